package duly

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	mqtt "github.com/eclipse/paho.mqtt.golang"
)

// unconnected is a node with a store and without a broker.
func unconnected(t *testing.T, path string) *Node {
	t.Helper()
	node, err := New(Options{URL: "mqtt://worker@localhost"})
	if err != nil {
		t.Fatal(err)
	}
	if node.store, err = openStore(path); err != nil {
		t.Fatal(err)
	}
	go node.store.run()
	t.Cleanup(node.store.close)
	node.context, node.cancel = context.WithCancel(context.Background())
	t.Cleanup(node.cancel)
	node.client = mqtt.NewClient(node.clientOptions("worker"))
	return node
}

func TestWhatACrashInterruptedIsNotCalledExpired(t *testing.T) {
	node := unconnected(t, "")
	node.Handle("turn_on", AtLeastOnce, func(context.Context, *Task) (any, error) {
		t.Error("it ran after its time")
		return nil, nil
	})
	for state, end := range map[string]string{accepted: StateExpired, begun: StateUnknown} {
		task := &incoming{Sender: "phone", ID: state, Action: "turn_on", Exp: 1, State: state}
		node.carryOut(task)
		if task.State != end {
			t.Errorf("what was %s has ended as %s, not %s", state, task.State, end)
		}
	}
}

func TestATaskIsNotedBeforeItIsRunWhateverItsEffect(t *testing.T) {
	for _, effect := range []Effect{AtMostOnce, AtLeastOnce} {
		path := filepath.Join(t.TempDir(), "store")
		node := unconnected(t, path)
		ran := false
		node.Handle("turn_on", effect, func(context.Context, *Task) (any, error) {
			ran = true
			text, err := os.ReadFile(path)
			if err != nil || !strings.Contains(string(text), `"state":"begun"`) {
				t.Errorf("it runs, and the store says %q %v", text, err)
			}
			return nil, nil
		})
		node.carryOut(&incoming{Sender: "phone", ID: "1", Action: "turn_on", State: accepted})
		if !ran {
			t.Error("it did not run")
		}
	}
}
