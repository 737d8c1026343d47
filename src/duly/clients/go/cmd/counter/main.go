// Counter is the node that `duly conform node` checks: counter HOST PORT NAME TOKEN FOLDER.
package main

import (
	"context"
	"fmt"
	"log"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"duly"
)

func main() {
	host, port, name, token, folder := os.Args[1], os.Args[2], os.Args[3], os.Args[4], os.Args[5]
	broker := url.URL{Scheme: "mqtt", User: url.UserPassword(name, token), Host: net.JoinHostPort(host, port)}
	node, err := duly.New(duly.Options{URL: broker.String(), Store: filepath.Join(folder, "node.log")})
	if err != nil {
		log.Fatal(err)
	}
	number := filepath.Join(folder, "count")
	node.Handle("count", duly.AtMostOnce, func(context.Context, *duly.Task) (any, error) {
		text, _ := os.ReadFile(number)
		n, _ := strconv.Atoi(strings.TrimSpace(string(text)))
		if err := os.WriteFile(number+".new", []byte(strconv.Itoa(n+1)), 0o600); err != nil {
			return nil, err
		}
		return map[string]int{"count": n + 1}, os.Rename(number+".new", number)
	})
	node.Handle("relay", duly.AtMostOnce, func(ctx context.Context, task *duly.Task) (any, error) {
		var wanted struct{ To string }
		if err := task.Payload.Decode(&wanted); err != nil {
			return nil, err
		}
		value, err := node.Call(ctx, wanted.To, "count", map[string]int{}, duly.SendOptions{Expires: time.Minute})
		if err != nil {
			return map[string]string{"state": "failed", "error": err.Error()}, nil
		}
		var count any
		if err := value.Decode(&count); err != nil {
			return nil, fmt.Errorf("%s does not answer with a count: %w", wanted.To, err)
		}
		return map[string]any{"state": "done", "value": count}, nil
	})
	for node.Start(context.Background()) != nil {
		time.Sleep(200 * time.Millisecond)
	}
	select {}
}
