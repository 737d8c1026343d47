package duly

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"net/url"
	"strings"
	"sync"
	"time"

	mqtt "github.com/eclipse/paho.mqtt.golang"
)

// How long things are waited for, and remembered.
const (
	horizon   = 24 * time.Hour  // without an `exp`, a task's `time` must be this recent
	skew      = 5 * time.Minute // how far ahead a sender's clock may be
	grace     = 2 * time.Second // how much later than its `exp` a task may come: clocks differ
	lapse     = time.Hour       // how much longer than that its id is remembered
	patience  = time.Hour       // how long after its expiry a received task may still be answered
	remember  = 7 * 24 * time.Hour
	longLived = 100_000 // ids of one sender that are kept for more than a day
	backlog   = 10_000  // tasks that wait or run; further ones stay at the broker, unacknowledged
	tick      = 200 * time.Millisecond
	asking    = "who." // the session of a status that says nothing and asks for one
)

// ErrNameTaken says that another process reads this node's mailbox.
var ErrNameTaken = errors.New("another process is at the mailbox of this node; give each its own name")

// Effect says what a crash in the middle of a handler means.
type Effect int

const (
	// AtMostOnce: it is not run again, and its sender is told that the outcome is unknown.
	AtMostOnce Effect = iota
	// AtLeastOnce: it is run again.
	AtLeastOnce
)

// Task is what a handler gets.
type Task struct {
	Sender, ID, Action string
	Payload            Content
	Attempt            int             // from 1
	Progress           func(value any) // tells the sender how far it is
}

// Handler carries a task out. What it returns is the result: bytes as they are, anything else as JSON. An error is
// the task's failure.
type Handler func(ctx context.Context, task *Task) (any, error)

// Options of a node. Only URL is needed: mqtt://user:password@host:1883, or mqtts://.
type Options struct {
	URL         string
	Name        string // if it is not the user of the URL
	Prefix      string // the first level of all topics: "nodes"
	Store       string // the file of its memory; empty: it ends with the process
	Key         *Key   // signs what we say
	Trusted     map[string][]Key
	Signed      bool // what is not signed is refused
	Form        Form // how payloads are written to peers of whom nothing is known: Base64
	Concurrency int  // handlers at a time: 100
	Heartbeat   time.Duration
	ResendFirst time.Duration // 5 s
	ResendMost  time.Duration // 5 min
}

type handler struct {
	run    Handler
	effect Effect
}

// Node sends tasks to other nodes and runs tasks that it is sent.
type Node struct {
	options  Options
	name     string
	handlers map[string]handler
	keys     *Keyring
	store    *store
	client   mqtt.Client
	ids      ids
	slots    chan struct{}
	context  context.Context
	cancel   context.CancelFunc
	running  sync.WaitGroup
	began    time.Time
	identity string

	mu       sync.Mutex
	session  string
	inbox    map[string]*incoming
	live     int
	held     []mqtt.Message
	outbox   map[string]*Sent
	order    uint64
	forms    map[string]Form
	refused  map[string]int
	unsaid   map[string]answer
	longKept map[string]int
}

// New is a node that is not started yet: give it its handlers, then Start it.
func New(options Options) (*Node, error) {
	address, err := url.Parse(options.URL)
	if err != nil || address.Host == "" {
		return nil, fmt.Errorf("a broker's address looks like mqtt://user:password@host:1883, not %q", options.URL)
	}
	name := options.Name
	if name == "" && address.User != nil {
		name = address.User.Username()
	}
	if err := CheckUsername(name); err != nil {
		return nil, err
	}
	orElse(&options.Prefix, "nodes")
	orElse(&options.Form, Base64)
	orElse(&options.Concurrency, 100)
	orElse(&options.Heartbeat, time.Minute)
	orElse(&options.ResendFirst, 5*time.Second)
	orElse(&options.ResendMost, 5*time.Minute)
	keys := NewKeyring(name, options.Prefix, options.Key, options.Signed)
	for peer, trusted := range options.Trusted {
		for _, key := range trusted {
			keys.Trust(peer, key)
		}
	}
	return &Node{
		options: options, name: name, handlers: map[string]handler{}, keys: keys,
		slots: make(chan struct{}, options.Concurrency), inbox: map[string]*incoming{}, outbox: map[string]*Sent{},
		forms: map[string]Form{}, refused: map[string]int{}, unsaid: map[string]answer{}, longKept: map[string]int{},
	}, nil
}

func orElse[T comparable](option *T, usual T) {
	var none T
	if *option == none {
		*option = usual
	}
}

// Handle says how tasks of an action are carried out. Call it before Start.
func (n *Node) Handle(action string, effect Effect, run Handler) {
	n.handlers[action] = handler{run, effect}
}

// Name of the node.
func (n *Node) Name() string { return n.name }

// Refused counts what was refused, by its reason.
func (n *Node) Refused() map[string]int {
	n.mu.Lock()
	defer n.mu.Unlock()
	counts := make(map[string]int, len(n.refused))
	for word, count := range n.refused {
		counts[word] = count
	}
	return counts
}

// Start opens the store, goes on with what is in it, and connects. It returns when the broker has answered; from
// then on the connection is made again whenever it breaks.
func (n *Node) Start(ctx context.Context) error {
	var err error
	if n.store, err = openStore(n.options.Store); err != nil {
		return err
	}
	n.began = time.Now()
	n.context, n.cancel = context.WithCancel(context.Background())
	go n.store.run()
	resume := n.recall()
	if len(n.handlers) > 0 {
		err = n.claim(ctx)
	}
	if err == nil {
		err = n.connect(ctx)
	}
	if err != nil {
		n.cancel()
		n.store.close()
		return err
	}
	for _, task := range resume {
		n.begin(task)
	}
	go n.watchTime()
	return nil
}

// Close ends the node. Handlers are told by their context and waited for, for some seconds; what is stored goes on
// at the next start.
func (n *Node) Close() error {
	if len(n.handlers) > 0 && n.client.IsConnected() {
		n.sayStatus(false).WaitTimeout(time.Second)
	}
	n.cancel()
	ended := make(chan struct{})
	go func() { n.running.Wait(); close(ended) }()
	select {
	case <-ended:
	case <-time.After(5 * time.Second):
	}
	n.client.Disconnect(250)
	n.store.close()
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, sent := range n.outbox {
		sent.fail(ErrClosed)
	}
	return nil
}

// recall takes over what an earlier process has stored; the tasks that were not ended then.
func (n *Node) recall() []*incoming {
	var resume []*incoming
	n.mu.Lock()
	defer n.mu.Unlock()
	for key, value := range n.store.entries {
		kind, rest, _ := strings.Cut(key, "/")
		switch kind {
		case "in":
			task := &incoming{}
			if json.Unmarshal(value, task) == nil {
				n.inbox[rest] = task
				n.countKept(task, 1)
				if !task.ended() {
					n.live++
					resume = append(resume, task)
				}
			}
		case "out":
			var kept keptTask
			if json.Unmarshal(value, &kept) == nil {
				n.outbox[rest] = n.newSent(kept)
				n.outbox[rest].published = true // it may have been
				n.order = max(n.order, kept.Order)
			}
		case "form":
			var form Form
			if json.Unmarshal(value, &form) == nil {
				n.forms[rest] = form
			}
		case "identity":
			_ = json.Unmarshal(value, &n.identity)
		}
	}
	if n.identity == "" {
		n.identity = randomHex(8)
		n.store.put([]change{put("identity", n.identity)}, nil)
	}
	sortByArrival(resume)
	return resume
}

func put(key string, value any) change {
	text, err := json.Marshal(value)
	if err != nil {
		panic(err) // our own structs
	}
	return change{key, text}
}

// ── the broker ───────────────────────────────────────────────────────────────────────────────────

func (n *Node) topic(name string, kind Kind) string {
	return n.options.Prefix + "/" + name + "/" + string(kind)
}

func (n *Node) clientOptions(id string) *mqtt.ClientOptions {
	address, _ := url.Parse(n.options.URL)
	scheme := map[string]string{"mqtt": "tcp", "mqtts": "ssl"}[address.Scheme]
	orElse(&scheme, address.Scheme)
	options := mqtt.NewClientOptions().AddBroker(scheme + "://" + address.Host).SetClientID(id)
	options.SetProtocolVersion(4).SetConnectTimeout(10 * time.Second).SetKeepAlive(20 * time.Second)
	options.SetPingTimeout(5 * time.Second).SetWriteTimeout(10 * time.Second)
	if address.User != nil {
		password, _ := address.User.Password()
		options.SetUsername(address.User.Username()).SetPassword(password)
	}
	return options
}

func (n *Node) clientID() string {
	address, _ := url.Parse(n.options.URL)
	if id := address.Query().Get("client_id"); id != "" {
		return id
	}
	return n.name
}

func (n *Node) connect(ctx context.Context) error {
	serves := len(n.handlers) > 0
	id := n.clientID()
	if !serves {
		id += "-" + randomHex(4) // any number of processes may send in one name
	}
	options := n.clientOptions(id).SetCleanSession(!serves).SetAutoReconnect(true)
	options.SetMaxReconnectInterval(10 * time.Second).SetConnectRetry(false).SetAutoAckDisabled(true)
	options.SetOrderMatters(true).SetResumeSubs(false)
	options.SetDefaultPublishHandler(n.hear)
	if serves {
		will := func() {
			n.mu.Lock()
			n.session = n.identity + "." + randomHex(4)
			n.mu.Unlock()
			options.SetBinaryWill(n.topic(n.name, Status), n.statusText(false), 1, true)
		}
		will()
		options.SetReconnectingHandler(func(_ mqtt.Client, again *mqtt.ClientOptions) {
			will()
			again.WillPayload = options.WillPayload
		})
	}
	options.SetOnConnectHandler(func(client mqtt.Client) { n.connected(client) })
	n.client = mqtt.NewClient(options)
	return wait(ctx, n.client.Connect(), "the broker cannot be reached")
}

// connected subscribes, and sends everything again: the broker may have lost it.
func (n *Node) connected(client mqtt.Client) {
	topics := map[string]byte{}
	kinds := []Kind{Ack, Complete, Failed}
	if len(n.handlers) > 0 {
		kinds = append(kinds, Pending, Status)
	}
	for _, kind := range kinds {
		topics[n.topic(n.name, kind)] = 1
	}
	n.mu.Lock()
	n.held = nil // it was not acknowledged, so it comes again
	n.mu.Unlock()
	go func() {
		token := client.SubscribeMultiple(topics, nil)
		token.Wait()
		if token.Error() != nil {
			log.Printf("duly: %s cannot subscribe: %v", n.name, token.Error())
			return
		}
		if len(n.handlers) > 0 {
			n.sayStatus(true)
		}
		n.sayAgain()
		n.sendAgain()
	}()
}

// claim refuses to start where another process reads this mailbox: two would run one task twice. A retained status
// that says so may be old, so its process is asked.
func (n *Node) claim(ctx context.Context) error {
	news := make(chan *Message, 16)
	options := n.clientOptions(n.clientID() + "-" + randomHex(4)).SetCleanSession(true).SetAutoReconnect(false)
	options.SetDefaultPublishHandler(func(_ mqtt.Client, message mqtt.Message) {
		if status, err := Decode(Status, message.Payload()); err == nil && !strings.HasPrefix(status.Session, asking) {
			select {
			case news <- status:
			default:
			}
		}
	})
	client := mqtt.NewClient(options)
	if err := wait(ctx, client.Connect(), "the broker cannot be reached"); err != nil {
		return err
	}
	defer client.Disconnect(100)
	if err := wait(ctx, client.Subscribe(n.topic(n.name, Status), 1, nil), "the broker refuses"); err != nil {
		return err
	}
	other := func(within time.Duration) bool {
		timeout := time.After(within)
		for {
			select {
			case status := <-news:
				if status.Online != nil && *status.Online && !strings.HasPrefix(status.Session, n.identity+".") {
					return true
				}
			case <-timeout:
				return false
			case <-ctx.Done():
				return false
			}
		}
	}
	if !other(250 * time.Millisecond) {
		return ctx.Err()
	}
	question := &Message{Session: asking + randomHex(4)}
	if err := n.keys.Sign(Status, question, ""); err != nil {
		return err
	}
	text, err := question.Encode(Status)
	if err != nil {
		return err
	}
	client.Publish(n.topic(n.name, Status), 1, false, text)
	if other(time.Second) {
		return fmt.Errorf("%s: %w", n.name, ErrNameTaken)
	}
	return ctx.Err()
}

func wait(ctx context.Context, token mqtt.Token, what string) error {
	select {
	case <-token.Done():
		if token.Error() != nil {
			return fmt.Errorf("%s: %w", what, token.Error())
		}
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%s: %w", what, ctx.Err())
	}
}

func (n *Node) statusText(online bool) []byte {
	n.mu.Lock()
	session := n.session
	n.mu.Unlock()
	status := &Message{Time: time.Now().Unix(), Online: &online, Session: session}
	if online {
		status.Uptime, status.Heartbeat = int64(time.Since(n.began).Seconds()), n.options.Heartbeat.Seconds()
	}
	if err := n.keys.Sign(Status, status, ""); err != nil {
		log.Printf("duly: the status of %s is not signed: %v", n.name, err)
	}
	text, err := status.Encode(Status)
	if err != nil {
		log.Printf("duly: the status of %s: %v", n.name, err)
	}
	return text
}

func (n *Node) sayStatus(online bool) mqtt.Token {
	return n.client.Publish(n.topic(n.name, Status), 1, true, n.statusText(online))
}

// hear takes in what the broker delivers; each message is acknowledged once what follows from it is stored.
func (n *Node) hear(_ mqtt.Client, message mqtt.Message) {
	kind := Kind(message.Topic()[strings.LastIndexByte(message.Topic(), '/')+1:])
	if kind == Status {
		n.hearStatus(message)
		return
	}
	said, err := Decode(kind, message.Payload())
	if err != nil {
		n.refuse("malformed", err)
		message.Ack()
		return
	}
	if kind == Pending {
		n.hearTask(message, said)
	} else {
		n.hearAnswer(kind, message, said)
	}
}

// hearStatus corrects a late will, and answers who asks.
func (n *Node) hearStatus(message mqtt.Message) {
	message.Ack()
	status, err := Decode(Status, message.Payload())
	if err != nil {
		return
	}
	n.mu.Lock()
	ours := status.Session == n.session
	n.mu.Unlock()
	if strings.HasPrefix(status.Session, asking) || (status.Online != nil && !*status.Online && !ours) {
		go n.sayStatus(true)
	}
}

func (n *Node) refuse(word string, reason error) {
	n.mu.Lock()
	n.refused[word]++
	n.mu.Unlock()
	log.Printf("duly: %s refused a message (%s): %v", n.name, word, reason)
}

// watchTime sends again, expires and forgets what is due, and says that the node is there.
func (n *Node) watchTime() {
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	status, cleaning := time.Now(), time.Now()
	for {
		select {
		case <-n.context.Done():
			return
		case now := <-ticker.C:
			n.sendDue(now)
			if now.Sub(cleaning) > time.Minute {
				cleaning = now
				n.forget(now)
			}
			if len(n.handlers) > 0 && now.Sub(status) >= n.options.Heartbeat && n.client.IsConnectionOpen() {
				status = now
				n.sayStatus(true)
			}
		}
	}
}

// formOf is the form in which a peer writes, as far as it has shown.
func (n *Node) formOf(peer string) Form {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.forms[peer]
}

// learn notes the form in which a peer writes. One that once wrote JSON writes JSON.
func (n *Node) learn(peer string, content Content) {
	if content.Form == "" || content.Sure {
		return
	}
	n.mu.Lock()
	known := n.forms[peer]
	news := known == "" || (content.Form == JSON && known != JSON)
	if news {
		n.forms[peer] = content.Form
	}
	n.mu.Unlock()
	if news {
		n.store.put([]change{put("form/"+peer, content.Form)}, nil)
	}
}
