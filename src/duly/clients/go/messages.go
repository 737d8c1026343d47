// Package duly is a node of FD, a small task protocol over MQTT: a task is stored before it leaves, sent again
// until it is answered or has expired, runs once, and its sender learns how it ended.
package duly

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strings"
	"unicode/utf8"
)

// Kind is the last level of a topic.
type Kind string

// The kinds of messages.
const (
	Pending  Kind = "pending"
	Ack      Kind = "ack"
	Complete Kind = "complete"
	Failed   Kind = "failed"
	Status   Kind = "status"
)

// The limits of a message on the wire.
const (
	SizeLimit = 256 * 1024
	NameLimit = 200
	timeLimit = 1 << 42 // seconds; what is later cannot be a time
)

// ErrMalformed says that a message is not one of the protocol.
var ErrMalformed = errors.New("malformed")

// Message is every field of every kind, as it stands on the wire. Times are in seconds.
type Message struct {
	Sender    string          `json:"sender,omitempty"`
	Receiver  string          `json:"receiver,omitempty"`
	MsgID     string          `json:"msg_id,omitempty"`
	Action    string          `json:"action,omitempty"`
	Time      int64           `json:"time"`
	Exp       int64           `json:"exp"`
	Payload   json.RawMessage `json:"payload,omitempty"`
	Value     json.RawMessage `json:"value,omitempty"`
	Error     json.RawMessage `json:"error,omitempty"`
	Order     json.RawMessage `json:"order,omitempty"`
	Online    *bool           `json:"online,omitempty"`
	Battery   *int            `json:"battery,omitempty"`
	RSSI      *int            `json:"rssi,omitempty"`
	IP        string          `json:"ip,omitempty"`
	Version   string          `json:"version,omitempty"`
	Uptime    int64           `json:"uptime,omitempty"`
	Session   string          `json:"session,omitempty"`
	Heartbeat float64         `json:"heartbeat,omitempty"`
	Data      json.RawMessage `json:"data,omitempty"`
	Progress  json.RawMessage `json:"progress,omitempty"`
	Sig       string          `json:"sig,omitempty"`
	Kid       string          `json:"kid,omitempty"`
	Enc       string          `json:"enc,omitempty"`

	// OldNames says that the peer uses the older field names; it is answered with them.
	OldNames bool `json:"-"`
}

// A message is read by the fields of its kind: what else a peer writes is its own, whatever another kind of message
// calls by that name. Names may be old or new, and times no whole numbers.
type readTask struct {
	Sender           *string         `json:"sender"`
	SenderClientID   *string         `json:"sender_client_id"`
	Receiver         *string         `json:"receiver"`
	ReceiverClientID *string         `json:"receiver_client_id"`
	MsgID            *string         `json:"msg_id"`
	MessageID        *string         `json:"message_id"`
	Action           string          `json:"action"`
	Time             *float64        `json:"time"`
	Timestamp        *float64        `json:"timestamp"`
	Exp              *float64        `json:"exp"`
	Expiration       *float64        `json:"expiration"`
	Payload          json.RawMessage `json:"payload"`
	Order            json.RawMessage `json:"order"`
	Sig              string          `json:"sig"`
	Kid              string          `json:"kid"`
	Enc              string          `json:"enc"`
}

type readAnswer struct {
	MsgID     *string         `json:"msg_id"`
	MessageID *string         `json:"message_id"`
	Value     json.RawMessage `json:"value"`
	Error     json.RawMessage `json:"error"`
	Progress  json.RawMessage `json:"progress"`
	Sig       string          `json:"sig"`
	Kid       string          `json:"kid"`
	Enc       string          `json:"enc"`
}

type readStatus struct {
	Time      *float64        `json:"time"`
	Timestamp *float64        `json:"timestamp"`
	Online    *bool           `json:"online"`
	Battery   *int            `json:"battery"`
	RSSI      *int            `json:"rssi"`
	IP        string          `json:"ip"`
	Version   string          `json:"version"`
	Uptime    *float64        `json:"uptime"`
	Session   string          `json:"session"`
	Heartbeat float64         `json:"heartbeat"`
	Data      json.RawMessage `json:"data"`
	Sig       string          `json:"sig"`
	Kid       string          `json:"kid"`
	Enc       string          `json:"enc"`
}

// Decode reads a message of a kind; the error says what is wrong with it.
func Decode(kind Kind, text []byte) (*Message, error) {
	if len(text) > SizeLimit {
		return nil, fmt.Errorf("%w: %d bytes, the limit is %d", ErrMalformed, len(text), SizeLimit)
	}
	if !utf8.Valid(text) {
		return nil, fmt.Errorf("%w: not UTF-8", ErrMalformed)
	}
	switch kind {
	case Pending:
		return decodeTask(text)
	case Status:
		return decodeStatus(text)
	}
	return decodeAnswer(text)
}

func unmarshal(text []byte, into any) error {
	if err := json.Unmarshal(text, into); err != nil {
		return fmt.Errorf("%w: not an FD message: %v", ErrMalformed, err)
	}
	return nil
}

func decodeStatus(text []byte) (*Message, error) {
	var w readStatus
	if err := unmarshal(text, &w); err != nil {
		return nil, err
	}
	return &Message{
		Online: w.Online, Battery: w.Battery, RSSI: w.RSSI, IP: w.IP, Version: w.Version, Session: w.Session,
		Heartbeat: w.Heartbeat, Data: w.Data, Sig: w.Sig, Kid: w.Kid, Enc: w.Enc,
		Time: seconds(firstNumber(w.Time, w.Timestamp)), Uptime: seconds(w.Uptime),
		OldNames: w.Time == nil && w.Timestamp != nil,
	}, nil
}

func decodeAnswer(text []byte) (*Message, error) {
	var w readAnswer
	if err := unmarshal(text, &w); err != nil {
		return nil, err
	}
	m := &Message{
		MsgID: first(w.MsgID, w.MessageID), Value: w.Value, Error: w.Error, Progress: w.Progress, Sig: w.Sig, Kid: w.Kid,
		Enc: w.Enc, OldNames: w.MsgID == nil && w.MessageID != nil,
	}
	if err := checkName(m.MsgID, "msg_id"); err != nil {
		return nil, err
	}
	return m, nil
}

func decodeTask(text []byte) (*Message, error) {
	var w readTask
	if err := unmarshal(text, &w); err != nil {
		return nil, err
	}
	m := &Message{
		Action: w.Action, Payload: w.Payload, Order: w.Order, Sig: w.Sig, Kid: w.Kid, Enc: w.Enc,
		Sender: first(w.Sender, w.SenderClientID), Receiver: first(w.Receiver, w.ReceiverClientID),
		MsgID: first(w.MsgID, w.MessageID), Time: seconds(firstNumber(w.Time, w.Timestamp)),
		OldNames: w.MsgID == nil && w.MessageID != nil,
	}
	if err := checkName(m.MsgID, "msg_id"); err != nil {
		return nil, err
	}
	if err := CheckUsername(m.Sender); err != nil {
		return nil, err
	}
	if m.Receiver != "" {
		if err := CheckUsername(m.Receiver); err != nil {
			return nil, err
		}
	}
	exp := firstNumber(w.Exp, w.Expiration)
	if exp != nil && *exp < 0 {
		return nil, fmt.Errorf("%w: exp is before 1970", ErrMalformed)
	}
	if exp != nil {
		m.Exp = int64(math.Min(*exp, timeLimit-1))
	}
	return m, checkName(m.Action, "action")
}

// Encode writes a message of a kind: the fields of that kind, under the names that the peer uses.
func (m *Message) Encode(kind Kind) ([]byte, error) {
	id := "msg_id"
	if m.OldNames {
		id = "message_id"
	}
	var fields []any
	switch kind {
	case Pending:
		names := []string{"sender", "receiver", "time", "exp"}
		if m.OldNames {
			names = []string{"sender_client_id", "receiver_client_id", "timestamp", "expiration"}
		}
		fields = []any{names[0], m.Sender, names[1], m.Receiver, id, m.MsgID, "action", m.Action, names[2], m.Time,
			names[3], m.Exp, "payload", orNull(m.Payload)}
		fields = optional(fields, "order", m.Order)
	case Ack:
		fields = optional([]any{id, m.MsgID}, "progress", m.Progress)
	case Complete:
		fields = []any{id, m.MsgID, "value", orNull(m.Value)}
	case Failed:
		fields = []any{id, m.MsgID, "error", orNull(m.Error)}
	case Status:
		status := *m
		return json.Marshal(struct {
			*Message
			Exp int64 `json:"exp,omitempty"`
		}{Message: &status})
	}
	fields = optional(fields, "sig", m.Sig, "kid", m.Kid, "enc", m.Enc)
	text, err := object(fields)
	if err == nil && len(text) > SizeLimit {
		err = fmt.Errorf("this message takes %d bytes, the limit is %d; send it in parts", len(text), SizeLimit)
	}
	return text, err
}

// CheckUsername says whether a name can stand in a topic, and reaches nowhere beyond its own level.
func CheckUsername(name string) error {
	if strings.ContainsAny(name, "/+#") {
		return fmt.Errorf("%w: the username %.80q contains / + or #", ErrMalformed, name)
	}
	return checkName(name, "username")
}

func checkName(name, field string) error {
	switch {
	case name == "":
		return fmt.Errorf("%w: %s is missing or empty", ErrMalformed, field)
	case len(name) > NameLimit:
		return fmt.Errorf("%w: %s has %d bytes, the limit is %d", ErrMalformed, field, len(name), NameLimit)
	case strings.ContainsRune(name, 0) || !utf8.ValidString(name):
		return fmt.Errorf("%w: %s has a NUL or is not UTF-8", ErrMalformed, field)
	}
	return nil
}

func first(new, old *string) string {
	if new != nil && *new != "" {
		return *new
	}
	if old != nil {
		return *old
	}
	return ""
}

func firstNumber(new, old *float64) *float64 {
	if new != nil {
		return new
	}
	return old
}

// seconds reads a time: clocks of small devices are often wrong, and what cannot be a time is as good as none.
func seconds(at *float64) int64 {
	if at == nil || !(*at >= 0 && *at < timeLimit) {
		return 0
	}
	return int64(*at)
}

func orNull(raw json.RawMessage) json.RawMessage {
	if len(raw) == 0 {
		return json.RawMessage("null")
	}
	return raw
}

// optional adds pairs of a name and a value, but for values that are empty.
func optional(fields []any, pairs ...any) []any {
	for i := 0; i < len(pairs); i += 2 {
		switch value := pairs[i+1].(type) {
		case string:
			if value == "" {
				continue
			}
		case json.RawMessage:
			if len(value) == 0 {
				continue
			}
		}
		fields = append(fields, pairs[i], pairs[i+1])
	}
	return fields
}

// object writes pairs of a name and a value, in this order.
func object(pairs []any) ([]byte, error) {
	var out bytes.Buffer
	out.WriteByte('{')
	for i := 0; i < len(pairs); i += 2 {
		if i > 0 {
			out.WriteByte(',')
		}
		fmt.Fprintf(&out, "%q:", pairs[i])
		if raw, ok := pairs[i+1].(json.RawMessage); ok {
			out.Write(raw)
			continue
		}
		value, err := encodeJSON(pairs[i+1])
		if err != nil {
			return nil, err
		}
		out.Write(value)
	}
	out.WriteByte('}')
	return out.Bytes(), nil
}

// encodeJSON writes a value without escaping what HTML would need escaped.
func encodeJSON(value any) ([]byte, error) {
	var out bytes.Buffer
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(value); err != nil {
		return nil, err
	}
	return bytes.TrimRight(out.Bytes(), "\n"), nil
}
