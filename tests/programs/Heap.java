import java.security.MessageDigest;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;

/** Heap [MIB]: fills a heap with objects, strings and arrays, re-reads and changes them, collects, prints digests. */
public final class Heap {
    record Node(int id, String name, Node next) {}

    public static void main(String[] arguments) throws Exception {
        int size = arguments.length > 0 ? Integer.parseInt(arguments[0]) : 120;
        Random random = new Random(7);
        List<Node> nodes = new ArrayList<>();
        Map<String, long[]> table = new HashMap<>();
        List<byte[]> blocks = new ArrayList<>();
        for (int i = 0; i < size * 3000; i++) {
            nodes.add(new Node(i, "node " + random.nextLong(), i == 0 ? null : nodes.get(random.nextInt(i))));
        }
        for (int i = 0; i < size * 400; i++) {
            long[] values = new long[64];
            for (int n = 0; n < values.length; n++) {
                values[n] = n % 3 == 0 ? random.nextLong() : n;
            }
            table.put("key " + i, values);
        }
        for (int i = 0; i < size * 15; i++) {
            byte[] block = new byte[16384];
            random.nextBytes(block);
            blocks.add(block);
        }
        System.out.println("built " + nodes.size() + " " + table.size() + " " + blocks.size());

        for (int turn = 0; turn < 4; turn++) {
            MessageDigest digest = MessageDigest.getInstance("SHA-256");
            long sum = 0;
            for (Node node : nodes) {
                sum += node.id() + node.name().hashCode() + (node.next() == null ? 0 : node.next().id());
            }
            for (int i = 0; i < size * 400; i++) {
                for (long value : table.get("key " + i)) {
                    sum = sum * 31 + value;
                }
            }
            blocks.forEach(digest::update);
            System.out.printf("%d %x %02x%n", turn, sum, new java.math.BigInteger(1, digest.digest()));
            for (int i = 0; i < size * 300; i++) {
                int at = random.nextInt(nodes.size());
                nodes.set(at, new Node(at, "changed " + i, null));
                blocks.get(random.nextInt(blocks.size()))[random.nextInt(16384)] = (byte) turn;
                table.get("key " + random.nextInt(size * 400))[random.nextInt(64)] = i;
            }
            System.gc();
        }
    }
}
