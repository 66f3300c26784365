# A tree is built, collected, compacted and read, also by forked children; threads fill a hash table.
Node = Struct.new(:key, :left, :right, :text)

def build(low, high)
  return if low > high
  middle = (low + high) / 2
  Node.new(middle, build(low, middle - 1), build(middle + 1, high), "text#{middle}")
end

def sum(node) = node ? (node.key + node.text.size + sum(node.left) + sum(node.right)) % 1000003 : 0

tree = build(0, 400_000)
puts sum(tree)
GC.start
GC.compact
puts sum(tree)
outputs = 3.times.map do |i|
  output, input = IO.pipe
  fork { GC.start; input.puts sum(tree) + i; input.close; exit!(i) }
  input.close
  output
end
outputs.each { |output| puts output.read }
puts Process.waitall.map { |_, status| status.exitstatus }.sort
table = {}
4.times.map { |i| Thread.new { 60_000.times { |j| table[[i, j]] = "v#{i * j}" } } }.each(&:join)
puts table.sum { |key, value| key.sum + value.size } % 1000003
