// Goroutines build trees and hash them, a map is filled, memory of C is used, a child is started.
package main

// #include <stdlib.h>
import "C"

import (
	"fmt"
	"hash/fnv"
	"os/exec"
	"runtime"
	"runtime/debug"
	"sync"
)

type node struct {
	left, right *node
	data        [40]byte
}

func build(depth, key int) *node {
	if depth == 0 {
		return nil
	}
	n := &node{left: build(depth-1, 2*key), right: build(depth-1, 2*key+1)}
	for i := range n.data {
		n.data[i] = byte(key + i)
	}
	return n
}

func (n *node) sum() uint64 {
	if n == nil {
		return 0
	}
	hash := fnv.New64()
	hash.Write(n.data[:])
	return hash.Sum64() + 3*n.left.sum() + 5*n.right.sum()
}

func main() {
	memory := C.malloc(1 << 20)
	defer C.free(memory)
	var all sync.WaitGroup
	sums := make([]uint64, 4)
	for i := range sums {
		all.Add(1)
		go func(i int) {
			defer all.Done()
			tree := build(18, i+1)
			for round := 0; round < 3; round++ {
				sums[i] = sums[i]*7 + tree.sum()
				runtime.GC()
			}
		}(i)
	}
	all.Wait()
	debug.FreeOSMemory()
	table := map[string][]byte{}
	for i := 0; i < 300000; i++ {
		table[fmt.Sprint(i)] = make([]byte, i%200)
	}
	total := 0
	for key, value := range table {
		total += len(key) * len(value)
	}
	said, err := exec.Command("/bin/echo", "a child").Output()
	fmt.Println(sums, total, string(said), err)
}
