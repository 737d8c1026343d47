package duly

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sort"
	"sync"
	"time"

	mqtt "github.com/eclipse/paho.mqtt.golang"
)

// How a task may end, other than done; the error of Sent.Result and Call wraps one of them.
var (
	ErrFailed    = errors.New("failed")
	ErrExpired   = errors.New("expired")
	ErrUnknown   = errors.New("unknown")
	ErrCancelled = errors.New("cancelled")
	ErrConflict  = errors.New("id_conflict")
)

// keptTask is a task of ours as it is stored.
type keptTask struct {
	ID       string          `json:"id"`
	To       string          `json:"to"`
	Text     []byte          `json:"text"`
	Exp      int64           `json:"exp"`
	Order    uint64          `json:"order"`
	State    string          `json:"state"` // accepted, or how it ended
	Answer   json.RawMessage `json:"answer,omitempty"`
	AnswerIn Form            `json:"answer_in,omitempty"`
}

// Sent is a task of ours. It is stored before it leaves, and sent again until it is answered or has expired.
type Sent struct {
	mu        *sync.Mutex // the node's
	kept      keptTask
	deciding  string // the end that is being stored
	published bool
	delivered bool
	tries     int
	again     time.Time
	settled   chan struct{}
	received  chan struct{}
	progress  func(Content)
	failure   error
}

func (n *Node) newSent(kept keptTask) *Sent {
	s := &Sent{mu: &n.mu, kept: kept, deciding: kept.State, settled: make(chan struct{}), received: make(chan struct{})}
	if s.over() {
		close(s.settled)
		s.reach()
	}
	return s
}

func (s *Sent) over() bool { return s.kept.State != accepted }

// reach notes that the receiver has the task. The node's lock is held.
func (s *Sent) reach() {
	if !s.delivered {
		s.delivered = true
		close(s.received)
	}
}

func (s *Sent) fail(problem error) {
	if !s.over() && s.failure == nil {
		s.failure = problem
		close(s.settled)
	}
}

// ID of the task.
func (s *Sent) ID() string { return s.kept.ID }

// State is `accepted`, `delivered` or how the task ended.
func (s *Sent) State() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.over() && s.delivered {
		return "delivered"
	}
	return s.kept.State
}

// Delivered is closed when the receiver has stored the task.
func (s *Sent) Delivered() <-chan struct{} { return s.received }

// Result waits for the end: what the task returned, or an error that wraps ErrFailed, ErrExpired, ErrUnknown or
// ErrCancelled. A late answer may settle what is unknown: ask again.
func (s *Sent) Result(ctx context.Context) (Content, error) {
	select {
	case <-s.settled:
	case <-ctx.Done():
		return Content{}, ctx.Err()
	}
	s.mu.Lock()
	kept, failure := s.kept, s.failure
	s.mu.Unlock()
	if failure != nil {
		return Content{}, failure
	}
	content, err := ReadContent(kept.Answer, kept.AnswerIn, string(kept.AnswerIn))
	if err != nil || kept.State == StateDone {
		return content, err
	}
	word := map[string]error{StateExpired: ErrExpired, StateUnknown: ErrUnknown, StateCancelled: ErrCancelled}[kept.State]
	if word == nil {
		word = ErrFailed
	}
	return content, fmt.Errorf("%w: task %s of %s: %s", word, kept.ID, kept.To, content)
}

// SendOptions of one task.
type SendOptions struct {
	Expires  time.Duration // a minute, if not given
	ID       string        // send under this id again, instead of a new one
	Progress func(Content) // hears how far the receiver is
}

// Call sends a task and waits for its result.
func (n *Node) Call(ctx context.Context, to, action string, payload any, options SendOptions) (Content, error) {
	sent, err := n.Send(ctx, to, action, payload, options)
	if err != nil {
		return Content{}, err
	}
	return sent.Result(ctx)
}

// Send sends a task; it returns when the task is stored.
func (n *Node) Send(ctx context.Context, to, action string, payload any, options SendOptions) (*Sent, error) {
	if err := CheckUsername(to); err != nil {
		return nil, err
	}
	if err := checkName(action, "action"); err != nil {
		return nil, err
	}
	orElse(&options.Expires, time.Minute)
	if options.Expires < 0 {
		return nil, fmt.Errorf("%w: it would have expired already", ErrMalformed)
	}
	form := n.formOf(to)
	orElse(&form, n.options.Form)
	content, err := write(payload, form)
	if err != nil {
		return nil, err
	}
	now := time.Now()
	id := options.ID
	if id == "" {
		id = n.ids.next(now)
	}
	exp := now.Add(options.Expires + time.Second - 1).Unix()
	message := &Message{Sender: n.name, Receiver: to, MsgID: id, Action: action, Time: now.Unix(), Exp: exp,
		Payload: content.Raw, Enc: mark(content)}
	if err := n.keys.Sign(Pending, message, to); err != nil {
		return nil, err
	}
	text, err := message.Encode(Pending)
	if err != nil {
		return nil, err
	}
	n.mu.Lock()
	if known := n.outbox[id]; known != nil {
		n.mu.Unlock()
		if known.kept.To != to || fingerprintOf(known.kept.Text) != fingerprint(message) {
			return nil, fmt.Errorf("%w: %s was used before for something else; nothing was sent", ErrConflict, id)
		}
		return known, nil
	}
	n.order++
	sent := n.newSent(keptTask{ID: id, To: to, Text: text, Exp: exp, Order: n.order, State: accepted})
	sent.progress = options.Progress
	n.outbox[id] = sent
	written := put("out/"+id, sent.kept)
	n.mu.Unlock()
	stored := make(chan struct{})
	n.store.put([]change{written}, func() {
		n.transmit(sent)
		close(stored)
	})
	select {
	case <-stored:
		return sent, nil
	case <-n.context.Done():
		return nil, ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err() // it may be stored: find it by its id
	}
}

func fingerprintOf(text []byte) string {
	message, err := Decode(Pending, text)
	if err != nil {
		return ""
	}
	return fingerprint(message)
}

// Find is a task that this node has sent, also before a restart; nil if there is none.
func (n *Node) Find(id string) *Sent {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.outbox[id]
}

// Cancel stops sending a task.
func (n *Node) Cancel(id string) {
	if sent := n.Find(id); sent != nil {
		n.settle(sent, StateCancelled, json.RawMessage(`"its sender has cancelled it"`), JSON, nil)
	}
}

func (n *Node) transmit(sent *Sent) {
	n.mu.Lock()
	if sent.over() {
		n.mu.Unlock()
		return
	}
	open := n.client != nil && n.client.IsConnectionOpen()
	if open {
		sent.published = true
	}
	pause := n.options.ResendFirst << min(sent.tries, 20)
	sent.again = time.Now().Add(min(pause, n.options.ResendMost))
	sent.tries++
	text, to := sent.kept.Text, sent.kept.To
	n.mu.Unlock()
	if open {
		n.client.Publish(n.topic(to, Pending), 1, false, text)
	}
}

// sendAgain publishes everything that is not answered, in order: the broker may have lost it.
func (n *Node) sendAgain() {
	for _, sent := range n.open() {
		n.mu.Lock()
		sent.tries = 0
		n.mu.Unlock()
		n.transmit(sent)
	}
}

func (n *Node) open() []*Sent {
	n.mu.Lock()
	defer n.mu.Unlock()
	var open []*Sent
	for _, sent := range n.outbox {
		if !sent.over() {
			open = append(open, sent)
		}
	}
	sort.Slice(open, func(i, j int) bool { return open[i].kept.Order < open[j].kept.Order })
	return open
}

// sendDue repeats and expires what is due. What was sent and never answered is unknown, not expired: it may have
// been done.
func (n *Node) sendDue(now time.Time) {
	for _, sent := range n.open() {
		n.mu.Lock()
		exp := time.Unix(sent.kept.Exp, 0).Add(grace)
		if sent.delivered {
			exp = exp.Add(patience)
		}
		published, again := sent.published, sent.again
		n.mu.Unlock()
		switch {
		case now.After(exp) && published:
			n.settle(sent, StateUnknown, json.RawMessage(`"no answer came; whether it took effect is not known"`), JSON, nil)
		case now.After(exp):
			n.settle(sent, StateExpired, json.RawMessage(`"it expired before it could be sent"`), JSON, nil)
		case now.After(again) && n.client.IsConnectionOpen():
			n.transmit(sent)
		}
	}
}

// hearAnswer takes in an answer. It counts only for a task of ours, and the first end stands; a late one settles what
// is unknown.
func (n *Node) hearAnswer(kind Kind, message mqtt.Message, said *Message) {
	sent := n.Find(said.MsgID)
	if sent == nil {
		n.refuse("unknown_task", fmt.Errorf("an answer to %s, which %s has not sent", said.MsgID, n.name))
		message.Ack()
		return
	}
	if err := n.keys.Check(kind, said, sent.kept.To); err != nil {
		n.refuse(errorWord(err), err)
		message.Ack()
		return
	}
	raw := map[Kind]json.RawMessage{Ack: said.Progress, Complete: said.Value, Failed: said.Error}[kind]
	content, err := ReadContent(raw, n.formOf(sent.kept.To), said.Enc)
	if err != nil {
		n.refuse("malformed", err)
		message.Ack()
		return
	}
	n.learn(sent.kept.To, content)
	n.mu.Lock()
	sent.reach()
	n.mu.Unlock()
	switch kind {
	case Ack:
		if len(raw) > 0 && sent.progress != nil {
			sent.progress(content)
		}
		message.Ack()
	case Complete:
		n.settle(sent, StateDone, content.Raw, content.Form, message.Ack)
	default:
		n.settle(sent, failure(content), content.Raw, content.Form, message.Ack)
	}
}

// failure is how a task ended, by its error: a node of duly names the state if it is not `failed`.
func failure(content Content) string {
	var why struct{ State string }
	if content.Decode(&why) == nil {
		switch why.State {
		case StateUnknown, StateExpired, StateCancelled, "superseded":
			return why.State
		}
	}
	return StateFailed
}

// settle stores how a task of ours ended, and then tells who waits for it.
func (n *Node) settle(sent *Sent, state string, raw json.RawMessage, form Form, then func()) {
	n.mu.Lock()
	first := sent.deciding == accepted
	late := sent.deciding == StateUnknown && state != StateUnknown
	if !first && !late {
		n.mu.Unlock()
		if then != nil {
			n.store.put(nil, then) // after the end that stands
		}
		return
	}
	sent.deciding = state
	kept := sent.kept
	kept.State, kept.Answer, kept.AnswerIn = state, raw, form
	written := put("out/"+kept.ID, kept)
	n.mu.Unlock()
	n.store.put([]change{written}, func() {
		if then != nil {
			then()
		}
		n.mu.Lock()
		defer n.mu.Unlock()
		sent.kept = kept
		sent.reach()
		if first && sent.failure == nil {
			close(sent.settled)
		}
	})
}
