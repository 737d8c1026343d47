// Lamp is a node to try: it serves lamps, or calls them.
//
//	lamp -url mqtt://B@localhost -store b.log -effects b.effects serve
//	lamp -url mqtt://A@localhost -store a.log -to B -count 3 call
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"log"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"duly"
)

var (
	url     = flag.String("url", "mqtt://lamp@localhost:1883", "the broker")
	prefix  = flag.String("prefix", "nodes", "the first level of all topics")
	store   = flag.String("store", "", "the file of the node's memory")
	effects = flag.String("effects", "", "a file with a line for each effect")
	again   = flag.Bool("again", false, "a task that a crash has interrupted is run again")
	work    = flag.Duration("work", 0, "how long a lamp takes")
	atOnce  = flag.Int("at-once", 100, "how many tasks are carried out at a time")
	to      = flag.String("to", "", "whom to call")
	count   = flag.Int("count", 1, "how many tasks to send")
	expires = flag.Duration("expires", time.Minute, "when they expire")
	resend  = flag.Duration("resend", 5*time.Second, "how soon a task is sent again")
	secret  = flag.String("key", "", "32 bytes in hexadecimal digits: the key that signs")
	trusted = flag.String("trust", "", "NAME=ed25519:…, whose messages are believed; others are refused")
)

func main() {
	flag.Parse()
	node, err := duly.New(options())
	if err != nil {
		log.Fatal(err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if flag.Arg(0) == "call" {
		err = call(ctx, node)
	} else {
		err = serve(ctx, node)
	}
	if err != nil {
		log.Fatal(err)
	}
}

func serve(ctx context.Context, node *duly.Node) error {
	book, err := os.OpenFile(*effects, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	effect := duly.AtMostOnce
	if *again {
		effect = duly.AtLeastOnce
	}
	node.Handle("turn_on", effect, func(ctx context.Context, task *duly.Task) (any, error) {
		var wanted struct{ Lamp int }
		if err := task.Payload.Decode(&wanted); err != nil {
			return nil, fmt.Errorf("the payload is no lamp: %w", err)
		}
		if wanted.Lamp < 0 {
			return nil, fmt.Errorf("there is no lamp %d", wanted.Lamp)
		}
		task.Progress("warming up")
		if _, err := fmt.Fprintf(book, "%s\n", task.ID); err != nil {
			return nil, err
		}
		if err := book.Sync(); err != nil {
			return nil, err
		}
		time.Sleep(*work)
		return map[string]any{"on": true, "lamp": wanted.Lamp}, nil
	})
	if err := node.Start(ctx); err != nil {
		return err
	}
	fmt.Println("serving")
	<-ctx.Done()
	return node.Close()
}

// call sends so many tasks, each under an id of its own that is the same after a restart, and prints how they ended.
func call(ctx context.Context, node *duly.Node) error {
	if err := node.Start(ctx); err != nil {
		return err
	}
	var waiting sync.WaitGroup
	var printing sync.Mutex
	for n := range *count {
		sent, err := node.Send(ctx, *to, "turn_on", map[string]int{"lamp": n}, duly.SendOptions{
			Expires: *expires, ID: fmt.Sprintf("%s-%d", node.Name(), n),
		})
		if err != nil {
			return err
		}
		waiting.Add(1)
		go func() {
			defer waiting.Done()
			value, err := sent.Result(ctx)
			line := map[string]any{"id": sent.ID(), "state": sent.State(), "value": value.String()}
			if err != nil {
				line["error"] = err.Error()
			}
			text, _ := json.Marshal(line)
			printing.Lock()
			defer printing.Unlock()
			fmt.Println(string(text))
		}()
	}
	waiting.Wait()
	return node.Close()
}
