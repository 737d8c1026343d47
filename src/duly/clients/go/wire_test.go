package duly

import (
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
)

// vectors reads the conformance vectors that every client of duly passes.
func vectors(t *testing.T, name string, into any) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", "testing", "vectors", name+".json"))
	if err != nil {
		t.Fatal(err)
	}
	file := struct{ Cases any }{into}
	if err := json.Unmarshal(text, &file); err != nil {
		t.Fatal(err)
	}
}

func TestContentsMeanWhatTheVectorsSay(t *testing.T) {
	var cases struct {
		Read []struct {
			Raw, Bytes string
			Enc, Form  *string
		}
	}
	vectors(t, "contents", &cases)
	for _, c := range cases.Read {
		enc := ""
		if c.Enc != nil {
			enc = *c.Enc
		}
		content, err := ReadContent(json.RawMessage(c.Raw), "", enc)
		form := ""
		if c.Form != nil {
			form = *c.Form
		}
		if err != nil || base64.StdEncoding.EncodeToString(content.Bytes) != c.Bytes || string(content.Form) != form {
			t.Errorf("%s with enc %q is %q (%s), %v; want %s (%s)", c.Raw, enc, content.Bytes, content.Form, err, c.Bytes, form)
		}
	}
	if len(cases.Read) < 10 {
		t.Fatal("there are no vectors")
	}
}

type signedCase struct {
	Kind, Prefix, Signer, Reader, Kid, Message, Why string
	Canonical                                       *string
}

func TestSignaturesAreTheVectors(t *testing.T) {
	var cases struct {
		Keys []struct {
			Algorithm, Secret, Kid string
			Public                 *string
		}
		Signed, Refused []signedCase
	}
	vectors(t, "signatures", &cases)
	keys := map[string]Key{}
	for _, c := range cases.Keys {
		secret, _ := base64.StdEncoding.DecodeString(c.Secret)
		key, err := NewKey(secret)
		if c.Algorithm != "ed25519" {
			key, err = SharedKey(secret)
		} else if key.Public() != "ed25519:"+*c.Public {
			t.Errorf("the public half is %s, not %s", key.Public(), *c.Public)
		}
		if err != nil || key.Kid != c.Kid {
			t.Errorf("the key's id is %s, not %s (%v)", key.Kid, c.Kid, err)
		}
		keys[key.Kid] = key
	}
	for _, c := range cases.Signed {
		kind := Kind(c.Kind)
		m, err := Decode(kind, []byte(c.Message))
		if err != nil {
			t.Fatal(err)
		}
		text, err := Canonical(c.Prefix, kind, m, c.Signer, c.Reader)
		if err != nil || hex.EncodeToString(text) != *c.Canonical {
			t.Errorf("%s: signed is %x, not %s (%v)", c.Message, text, *c.Canonical, err)
		}
		ring := NewKeyring(c.Reader, c.Prefix, nil, true).Trust(c.Signer, keys[c.Kid])
		if err := ring.Check(kind, m, c.Signer); err != nil {
			t.Errorf("%s: %v", c.Message, err)
		}
		key := keys[c.Kid]
		signer := NewKeyring(c.Signer, c.Prefix, &key, true)
		again := *m
		if err := signer.Sign(kind, &again, c.Reader); err != nil || again.Sig != m.Sig || again.Kid != m.Kid {
			t.Errorf("%s is signed as %s by us (%v)", c.Message, again.Sig, err)
		}
	}
	for _, c := range cases.Refused {
		m, err := Decode(Kind(c.Kind), []byte(c.Message))
		if err != nil {
			continue
		}
		ring := NewKeyring(c.Reader, c.Prefix, nil, true).Trust("A", keys[c.Kid])
		if err := ring.Check(Kind(c.Kind), m, c.Signer); err == nil {
			t.Errorf("%s: %s was believed", c.Why, c.Message)
		}
	}
	if len(cases.Signed) < 5 || len(cases.Refused) < 5 {
		t.Fatal("there are no vectors")
	}
}

// The structs of the protocol's document: bytes are base64 in JSON, nil is null.
type messagePending struct {
	Sender   string `json:"sender"`
	Receiver string `json:"receiver"`
	MsgId    string `json:"msg_id"`
	Action   string `json:"action"`
	Time     int64  `json:"time"`
	Exp      int64  `json:"exp"`
	Payload  []byte `json:"payload"`
}

type messageComplete struct {
	MsgId string `json:"msg_id"`
	Value []byte `json:"value"`
}

func TestTheDocumentsStructsReadAndWriteTheSame(t *testing.T) {
	asked := messagePending{"A", "B", "1", "turn_on", 1700000000, 1700000060, []byte(`{"lamp":1}`)}
	text, _ := json.Marshal(asked)
	m, err := Decode(Pending, text)
	if err != nil {
		t.Fatal(err)
	}
	content, err := ReadContent(m.Payload, "", m.Enc)
	if err != nil || string(content.Bytes) != `{"lamp":1}` || content.Form != Base64 {
		t.Fatalf("%q (%s), %v", content.Bytes, content.Form, err)
	}
	value, _ := write(map[string]bool{"on": true}, content.Form)
	said, err := (&Message{MsgID: "1", Value: value.Raw, Enc: mark(value)}).Encode(Complete)
	if err != nil {
		t.Fatal(err)
	}
	var heard messageComplete
	if err := json.Unmarshal(said, &heard); err != nil || string(heard.Value) != `{"on":true}` || heard.MsgId != "1" {
		t.Fatalf("%s: %v", said, err)
	}
	sent, _ := (&Message{Sender: "A", Receiver: "B", MsgID: "1", Action: "turn_on", Time: asked.Time, Exp: asked.Exp,
		Payload: spelled(asked.Payload, Base64)}).Encode(Pending)
	if string(sent) != string(text) {
		t.Errorf("%s, not %s", sent, text)
	}
}

func TestOlderNamesAreReadAndAnsweredInKind(t *testing.T) {
	m, err := Decode(Pending, []byte(`{"sender_client_id":"A","receiver_client_id":"B","message_id":"1","action":"x","timestamp":7,"expiration":9.5}`))
	if err != nil || m.Sender != "A" || m.Receiver != "B" || m.MsgID != "1" || m.Time != 7 || m.Exp != 9 || !m.OldNames {
		t.Fatalf("%+v, %v", m, err)
	}
	said, _ := (&Message{MsgID: "1", OldNames: true}).Encode(Ack)
	if string(said) != `{"message_id":"1"}` {
		t.Error(string(said))
	}
}

func TestWhatIsNoMessageIsRefused(t *testing.T) {
	wrong := []string{"", "[]", "7", `{"sender":"A","action":"x"}`, `{"sender":"A/b","msg_id":"1","action":"x"}`,
		`{"sender":"A","msg_id":"1"}`, `{"sender":"A","msg_id":"1","action":"x","exp":-1}`, `{"msg_id":7}`, "{\"msg_id\":\"\xff\"}"}
	for _, text := range wrong {
		if _, err := Decode(Pending, []byte(text)); err == nil {
			t.Errorf("%q was read", text)
		}
	}
}

func FuzzDecode(f *testing.F) {
	f.Add([]byte(`{"sender":"A","receiver":"B","msg_id":"1","action":"x","time":1,"exp":2,"payload":"dGVzdA=="}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		for _, kind := range []Kind{Pending, Ack, Complete, Failed, Status} {
			m, err := Decode(kind, text)
			if err != nil {
				continue
			}
			if _, err := ReadContent(m.Payload, "", m.Enc); err == nil {
				_, _ = Canonical("nodes", kind, m, "A", "B")
			}
		}
	})
}

// A field that another kind of message has is a peer's own.
func TestAFieldOfAnotherKindIsAPeersOwn(t *testing.T) {
	for kind, text := range map[Kind]string{
		Pending:  `{"sender":"A","msg_id":"1","action":"x","version":2,"battery":"low","online":"yes","uptime":[1]}`,
		Complete: `{"msg_id":"1","sender":7,"time":"now","session":1}`,
		Status:   `{"online":true,"msg_id":1,"exp":"x","action":{}}`,
	} {
		if _, err := Decode(kind, []byte(text)); err != nil {
			t.Errorf("%s: %v", kind, err)
		}
	}
}
