package duly

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"sort"
	"time"

	mqtt "github.com/eclipse/paho.mqtt.golang"
)

// The states of a task, as every client of duly names them.
const (
	accepted       = "accepted"
	begun          = "begun"
	StateDone      = "done"
	StateFailed    = "failed"
	StateExpired   = "expired"
	StateUnknown   = "unknown"
	StateCancelled = "cancelled"
)

// incoming is a task that was received: stored before it is acknowledged, run once, and answered to every repeat.
type incoming struct {
	Sender   string          `json:"sender"`
	ID       string          `json:"id"`
	Action   string          `json:"action"`
	Payload  json.RawMessage `json:"payload,omitempty"`
	Enc      string          `json:"enc,omitempty"`
	Exp      int64           `json:"exp,omitempty"`
	Keep     int64           `json:"keep"` // until when its id is remembered
	Old      bool            `json:"old,omitempty"`
	Print    string          `json:"print"`
	Arrived  int64           `json:"arrived"`
	State    string          `json:"state"`
	Attempt  int             `json:"attempt,omitempty"`
	Answer   json.RawMessage `json:"answer,omitempty"`
	AnswerIn Form            `json:"answer_in,omitempty"`
}

type answer struct {
	to   string
	kind Kind
	text []byte
}

func (t *incoming) key() string { return t.Sender + "/" + t.ID }

func (t *incoming) ended() bool { return t.State != accepted && t.State != begun }

func (t *incoming) change() change { return put("in/"+t.key(), t) }

func sortByArrival(tasks []*incoming) {
	sort.Slice(tasks, func(i, j int) bool { return tasks[i].Arrived < tasks[j].Arrived })
}

// fingerprint tells another task under the same id: by the bytes' meaning, not by how they are signed.
func fingerprint(m *Message) string {
	text, _ := tag(m.Payload, m.Enc)
	hash := sha256.New()
	for _, field := range []string{m.Action, text, string(m.Order)} {
		fmt.Fprintf(hash, "%d %s", len(field), field)
	}
	return hex.EncodeToString(hash.Sum(nil)[:12])
}

func (n *Node) hearTask(message mqtt.Message, said *Message) {
	if said.Receiver != "" && said.Receiver != n.name {
		n.refuse("other_receiver", fmt.Errorf("%s of %s is for %s", said.MsgID, said.Sender, said.Receiver))
		message.Ack()
		return
	}
	if err := n.keys.Check(Pending, said, said.Sender); err != nil {
		n.refuse(errorWord(err), err)
		message.Ack()
		return
	}
	now := time.Now()
	task := &incoming{
		Sender: said.Sender, ID: said.MsgID, Action: said.Action, Payload: said.Payload, Enc: said.Enc, Exp: said.Exp,
		Old: said.OldNames, Print: fingerprint(said), Arrived: now.UnixNano(), State: accepted,
	}
	n.mu.Lock()
	known := n.inbox[task.key()]
	if known == nil && n.live >= backlog {
		n.held = append(n.held, message)
		n.mu.Unlock()
		return
	}
	if known == nil {
		if word, reason := n.judge(task, said, now); word != "" {
			n.mu.Unlock()
			n.refuse(word, reason)
			message.Ack()
			return
		}
		n.inbox[task.key()] = task
		n.countKept(task, 1)
		n.live++
	}
	n.mu.Unlock()
	if known != nil {
		if known.Print != task.Print {
			n.refuse("id_conflict", fmt.Errorf("%s of %s was used before for something else", task.ID, task.Sender))
			message.Ack()
			return
		}
		n.store.put(nil, func() { // after what was stored before it
			message.Ack()
			n.acknowledge(known)
			n.tell(known)
		})
		return
	}
	if content, err := ReadContent(said.Payload, n.formOf(said.Sender), said.Enc); err == nil {
		n.learn(said.Sender, content)
	}
	n.store.put([]change{task.change()}, func() {
		message.Ack()
		n.acknowledge(task)
		n.begin(task)
	})
}

// judge says why a task is not taken, if so, and until when its id is remembered. What is no longer remembered is no
// longer taken.
func (n *Node) judge(task *incoming, said *Message, now time.Time) (string, error) {
	made := time.Unix(said.Time, 0)
	switch {
	case said.Exp > 0:
		exp := time.Unix(said.Exp, 0)
		if now.After(exp.Add(grace)) {
			return "expired", fmt.Errorf("%s of %s has expired", said.MsgID, said.Sender)
		}
		task.Keep = exp.Add(grace + lapse).Unix()
	case said.Time == 0 || now.Sub(made) > horizon:
		return "stale", fmt.Errorf("%s of %s has no exp, and its time is not of the last day", said.MsgID, said.Sender)
	case made.Sub(now) > skew:
		return "future", fmt.Errorf("the time of %s of %s is in the future", said.MsgID, said.Sender)
	default:
		task.Keep = made.Add(horizon + skew).Unix()
	}
	if n.isLongKept(task) && n.longKept[task.Sender] >= longLived {
		return "budget", fmt.Errorf("%s has used up its %d ids that are kept for long", task.Sender, longLived)
	}
	return "", nil
}

func (n *Node) isLongKept(task *incoming) bool {
	return time.Duration(task.Keep-task.Arrived/int64(time.Second))*time.Second > horizon+lapse+grace
}

func (n *Node) countKept(task *incoming, by int) {
	if n.isLongKept(task) {
		n.longKept[task.Sender] += by
	}
}

// begin runs a task that is stored, when its turn comes.
func (n *Node) begin(task *incoming) {
	n.running.Add(1)
	go func() {
		defer n.running.Done()
		select {
		case n.slots <- struct{}{}:
		case <-n.context.Done():
			return
		}
		defer func() { <-n.slots }()
		n.carryOut(task)
	}()
}

func (n *Node) carryOut(task *incoming) {
	how, known := n.handlers[task.Action]
	form := n.answerForm(task)
	switch {
	case !known:
		n.end(task, StateFailed, fmt.Sprintf("%s does not know %s", n.name, task.Action), form)
		return
	case task.State == begun && how.effect == AtMostOnce:
		n.endUntold(task, StateUnknown, "the node crashed while it was at work; whether it was done is not known", form)
		return
	case task.Exp > 0 && time.Now().After(time.Unix(task.Exp, 0).Add(grace)) && task.State == begun:
		n.endUntold(task, StateUnknown, "the node crashed while it was at work, and it has expired since; "+
			"whether it was done is not known", form)
		return
	case task.Exp > 0 && time.Now().After(time.Unix(task.Exp, 0).Add(grace)):
		n.endUntold(task, StateExpired, "it expired before it could be done", form)
		return
	}
	n.mu.Lock()
	task.State = begun
	task.Attempt++
	written := task.change()
	n.mu.Unlock()
	stored := make(chan struct{})
	n.store.put([]change{written}, func() { close(stored) })
	select {
	case <-stored:
	case <-n.context.Done():
		return
	}
	content, err := ReadContent(task.Payload, n.formOf(task.Sender), task.Enc)
	var result any
	if err == nil {
		result, err = n.call(how.run, &Task{
			Sender: task.Sender, ID: task.ID, Action: task.Action, Payload: content, Attempt: task.Attempt,
			Progress: func(value any) { n.progress(task, value, form) },
		})
	}
	if n.context.Err() != nil && errors.Is(err, context.Canceled) {
		return // we were closed: it goes on, or is unknown, at the next start
	}
	if err != nil {
		n.end(task, StateFailed, err.Error(), form)
		return
	}
	n.end(task, StateDone, result, form)
}

func (n *Node) call(run Handler, task *Task) (result any, err error) {
	defer func() {
		if problem := recover(); problem != nil {
			err = fmt.Errorf("panic: %v", problem)
		}
	}()
	return run(n.context, task)
}

// answerForm is the form in which a task is answered: that in which it was asked.
func (n *Node) answerForm(task *incoming) Form {
	known := n.formOf(task.Sender)
	if content, err := ReadContent(task.Payload, known, task.Enc); err == nil && content.Form != "" {
		return content.Form
	}
	if known != "" {
		return known
	}
	return n.options.Form
}

func (n *Node) endUntold(task *incoming, state, detail string, form Form) {
	n.end(task, state, map[string]any{"code": 4, "detail": detail, "state": state}, form)
}

// end stores how a task ended, and then tells its sender.
func (n *Node) end(task *incoming, state string, said any, form Form) {
	content, err := write(said, form)
	if err == nil && len(content.Raw) > SizeLimit-1024 {
		err = fmt.Errorf("the answer takes %d bytes, the limit is %d", len(content.Raw), SizeLimit-1024)
	}
	if err != nil {
		state = StateFailed
		content, _ = write(err.Error(), form)
	}
	n.mu.Lock()
	task.State, task.Answer, task.AnswerIn = state, content.Raw, form
	task.Payload = nil // the fingerprint is enough to know a repeat
	written := task.change()
	n.mu.Unlock()
	n.store.put([]change{written}, func() {
		n.tell(task)
		n.mu.Lock()
		n.live--
		held := n.held
		n.held = nil
		n.mu.Unlock()
		for _, message := range held {
			n.hear(nil, message)
		}
	})
}

func (n *Node) acknowledge(task *incoming) {
	n.say(task.Sender, Ack, &Message{MsgID: task.ID, OldNames: task.Old}, "")
}

func (n *Node) progress(task *incoming, value any, form Form) {
	content, err := write(value, form)
	if err == nil {
		n.say(task.Sender, Ack, &Message{MsgID: task.ID, OldNames: task.Old, Progress: content.Raw, Enc: mark(content)}, "")
	}
}

// tell sends the stored answer of a task that has ended, again at every connection until the broker has it.
func (n *Node) tell(task *incoming) {
	n.mu.Lock()
	ended, state := task.ended(), task.State
	content := Content{Raw: task.Answer, Form: task.AnswerIn}
	n.mu.Unlock()
	if !ended {
		return
	}
	message := &Message{MsgID: task.ID, OldNames: task.Old, Enc: mark(content)}
	if state == StateDone {
		message.Value = content.Raw
		n.say(task.Sender, Complete, message, task.key())
	} else {
		message.Error = content.Raw
		n.say(task.Sender, Failed, message, task.key())
	}
}

// say signs and publishes a message; with a key it is kept until the broker has confirmed it.
func (n *Node) say(to string, kind Kind, message *Message, key string) {
	if err := n.keys.Sign(kind, message, to); err != nil {
		n.refuse(errorWord(err), err)
		return
	}
	text, err := message.Encode(kind)
	if err != nil {
		n.refuse("malformed", err)
		return
	}
	one := answer{to, kind, text}
	if key != "" {
		n.mu.Lock()
		n.unsaid[key] = one
		n.mu.Unlock()
	}
	n.publish(key, one)
}

func (n *Node) publish(key string, one answer) {
	if !n.client.IsConnectionOpen() {
		return // it is lost, as it might be on the way; what is kept goes out at the next connection
	}
	token := n.client.Publish(n.topic(one.to, one.kind), 1, false, one.text)
	if key == "" {
		return
	}
	go func() {
		<-token.Done()
		if token.Error() == nil {
			n.mu.Lock()
			delete(n.unsaid, key)
			n.mu.Unlock()
		}
	}()
}

// sayAgain publishes the answers that the broker has not confirmed.
func (n *Node) sayAgain() {
	n.mu.Lock()
	unsaid := make(map[string]answer, len(n.unsaid))
	for key, one := range n.unsaid {
		unsaid[key] = one
	}
	n.mu.Unlock()
	for key, one := range unsaid {
		n.publish(key, one)
	}
}

// forget drops ids whose tasks can no longer be taken, and tasks of ours that ended long ago.
func (n *Node) forget(now time.Time) {
	var changes []change
	n.mu.Lock()
	for key, task := range n.inbox {
		if task.ended() && task.Keep < now.Unix() {
			delete(n.inbox, key)
			n.countKept(task, -1)
			changes = append(changes, change{Key: "in/" + key})
		}
	}
	for id, sent := range n.outbox {
		if sent.over() && now.Sub(time.Unix(sent.kept.Exp, 0)) > remember {
			delete(n.outbox, id)
			changes = append(changes, change{Key: "out/" + id})
		}
	}
	n.mu.Unlock()
	if len(changes) > 0 {
		n.store.put(changes, nil)
	}
}

func errorWord(err error) string {
	for _, known := range []error{ErrUnsigned, ErrUnknownKey, ErrForged} {
		if errors.Is(err, known) {
			return known.Error()
		}
	}
	return "refused"
}
