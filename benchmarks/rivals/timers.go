// Measures Go's time.AfterFunc and Stop.
//
// The protocol and the measurements are those of benchmarks/timer/peers.py. The runtime starts a
// goroutine for each timer that fires. Its scheduler fires timers whenever it runs, so due timers
// cannot be held back: "backlog" is not measured.
package main

import (
	"bufio"
	"fmt"
	"math/rand"
	"os"
	"runtime"
	"slices"
	"sync"
	"time"
)

const constant = 60 * time.Second

var (
	input  = bufio.NewReader(os.Stdin)
	random = rand.New(rand.NewSource(1))
	delays = randomDelays(100_000, 30_000, 90_000)
)

func main() {
	for {
		var measure string
		var pending, calls int
		line, err := input.ReadString('\n')
		if err != nil {
			return
		}
		fmt.Sscan(line, &measure, &pending, &calls)
		switch measure {
		case "calls":
			measureCalls(pending, calls)
		case "ontime":
			measureOnTime(calls)
		case "pending":
			measurePending(pending, calls)
		case "lateness":
			measureLateness(calls)
		default:
			panic(line)
		}
		fmt.Println("ok")
	}
}

func measureCalls(pending, calls int) {
	filled := fill(pending)
	runtime.GC()
	for i := 0; i < calls/4; i++ {
		time.AfterFunc(constant, nothing).Stop()
	}
	pause("begin")
	for i := 0; i < calls; i++ {
		time.AfterFunc(constant, nothing).Stop()
	}
	pause(fmt.Sprint("end pair ", calls))
	pause("begin")
	for i := 0; i < calls; i++ {
		time.AfterFunc(delays[i%len(delays)], nothing).Stop()
	}
	pause(fmt.Sprint("end varied ", calls))
	timers := make([]*time.Timer, calls)
	pause("begin")
	for i := range timers {
		timers[i] = time.AfterFunc(delays[i%len(delays)], nothing)
	}
	pause(fmt.Sprint("end start ", calls))
	pause("begin")
	for _, timer := range timers {
		timer.Stop()
	}
	pause(fmt.Sprint("end cancel ", calls))
	for _, timer := range filled {
		timer.Stop()
	}
}

func measureOnTime(calls int) {
	last := 1000 + calls/100
	done := make(chan bool)
	for _, delay := range randomDelays(calls, 1000, last) {
		time.AfterFunc(delay, nothing)
	}
	time.AfterFunc(time.Duration(last+10)*time.Millisecond, func() { close(done) })
	pause("begin")
	<-done
	pause(fmt.Sprint("end ontime ", calls))
}

func measurePending(count, milliseconds int) {
	pause("begin")
	time.Sleep(time.Duration(milliseconds) * time.Millisecond)
	pause("end empty 1")
	before := usedBytes()
	for i := 0; i < count; i++ {
		time.AfterFunc(delays[i%len(delays)], nothing)
	}
	fmt.Println("value bytes", float64(usedBytes()-before)/float64(count))
	time.Sleep(time.Second)
	pause("begin")
	time.Sleep(time.Duration(milliseconds) * time.Millisecond)
	pause("end idle 1")
}

func measureLateness(calls int) {
	late := make([]float64, calls)
	var running sync.WaitGroup
	running.Add(calls)
	for i, delay := range randomDelays(calls, 1, 100) {
		due := time.Now().Add(delay)
		time.AfterFunc(delay, func() {
			late[i] = float64(time.Since(due).Nanoseconds()) / 1e3
			running.Done()
		})
	}
	running.Wait()
	slices.Sort(late)
	fmt.Println("value p50_us", late[calls/2])
	fmt.Println("value p99_us", late[calls*99/100])
	fmt.Println("value least_us", late[0])
}

func fill(pending int) []*time.Timer {
	timers := make([]*time.Timer, pending)
	for i := range timers {
		timers[i] = time.AfterFunc(delays[i%len(delays)], nothing)
	}
	return timers
}

func usedBytes() uint64 {
	var stats runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&stats)
	return stats.HeapAlloc
}

func pause(text string) {
	fmt.Println(text)
	input.ReadString('\n')
}

func randomDelays(count, low, high int) []time.Duration {
	drawn := make([]time.Duration, count)
	for i := range drawn {
		drawn[i] = time.Duration(low+random.Intn(high-low+1)) * time.Millisecond
	}
	return drawn
}

func nothing() {}
