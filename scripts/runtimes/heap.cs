// Three threads fill a dictionary each.
using System;
using System.Collections.Generic;
using System.Linq;
using System.Threading;

class Heap {
    static long Sum(int number) {
        var table = new Dictionary<int, string>();
        for (int i = 0; i < 250000; i++) table[i] = (i * (number + 1)).ToString();
        GC.Collect();
        return table.Aggregate(0L, (sum, entry) => (sum * 31 + entry.Key + entry.Value.Length) % 1000000007);
    }

    static void Main() {
        var sums = new long[3];
        var threads = Enumerable.Range(0, 3).Select(number => new Thread(() => sums[number] = Sum(number))).ToList();
        threads.ForEach(thread => thread.Start());
        threads.ForEach(thread => thread.Join());
        Console.WriteLine(string.Join("\n", sums));
    }
}
