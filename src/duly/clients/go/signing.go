package duly

import (
	"crypto/ed25519"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"golang.org/x/crypto/blake2b"
)

const signedFormat = "duly-fd-1"

// What is wrong with a signature.
var (
	ErrUnsigned   = errors.New("unsigned")
	ErrUnknownKey = errors.New("unknown_key")
	ErrForged     = errors.New("forged")
)

// Key signs with its secret, and verifies. A shared key (HMAC-SHA256) proves something to the two who have it.
type Key struct {
	Kid    string
	public ed25519.PublicKey
	secret ed25519.PrivateKey
	shared []byte
}

// NewKey is the Ed25519 key with this secret of 32 bytes.
func NewKey(secret []byte) (Key, error) {
	if len(secret) != ed25519.SeedSize {
		return Key{}, fmt.Errorf("a key has %d bytes, not %d", ed25519.SeedSize, len(secret))
	}
	private := ed25519.NewKeyFromSeed(secret)
	public := private.Public().(ed25519.PublicKey)
	return Key{Kid: kid("ed25519", public), public: public, secret: private}, nil
}

// SharedKey is the HMAC key with this secret of 32 bytes.
func SharedKey(secret []byte) (Key, error) {
	if len(secret) != 32 {
		return Key{}, fmt.Errorf("a key has 32 bytes, not %d", len(secret))
	}
	return Key{Kid: kid("hmac-sha256", secret), shared: secret}, nil
}

// ReadKey is a public key as `duly keys list` shows it: ed25519:O2onv…
func ReadKey(text string) (Key, error) {
	word, data, _ := strings.Cut(strings.TrimSpace(text), ":")
	public, err := base64.StdEncoding.DecodeString(data)
	if word != "ed25519" || err != nil || len(public) != ed25519.PublicKeySize {
		return Key{}, errors.New("a public key looks like ed25519:O2onv…; 'duly keys list' shows one's own")
	}
	return Key{Kid: kid("ed25519", public), public: public}, nil
}

// Public is the text of the key that others may see.
func (k Key) Public() string {
	return "ed25519:" + base64.StdEncoding.EncodeToString(k.public)
}

func kid(algorithm string, identity []byte) string {
	hash, _ := blake2b.New(8, nil)
	fmt.Fprintf(hash, "duly key\x00%s\x00", algorithm)
	hash.Write(identity)
	return hex.EncodeToString(hash.Sum(nil))
}

func (k Key) sign(text []byte) []byte {
	if k.shared != nil {
		mac := hmac.New(sha256.New, k.shared)
		mac.Write(text)
		return mac.Sum(nil)
	}
	return ed25519.Sign(k.secret, text)
}

func (k Key) verify(signature, text []byte) bool {
	if k.shared != nil {
		return hmac.Equal(signature, k.sign(text))
	}
	return ed25519.Verify(k.public, text, signature)
}

func (k Key) canSign() bool { return k.secret != nil || k.shared != nil }

// Keyring is the key that signs, and the keys of others that are believed, each for one username.
type Keyring struct {
	name     string
	prefix   string
	required bool
	own      *Key
	believed map[[2]string]Key
	shared   map[string]Key
}

// NewKeyring is the keyring of a node. `required`: what is not signed is refused.
func NewKeyring(name, prefix string, own *Key, required bool) *Keyring {
	ring := &Keyring{name: name, prefix: prefix, required: required, own: own,
		believed: map[[2]string]Key{}, shared: map[string]Key{}}
	if own != nil {
		ring.believed[[2]string{name, own.Kid}] = *own
	}
	return ring
}

// Trust believes a key for a username.
func (r *Keyring) Trust(name string, key Key) *Keyring {
	key.secret = nil
	r.believed[[2]string{name, key.Kid}] = key
	if key.shared != nil {
		r.shared[name] = key
	}
	return r
}

// Sign puts our signature on a message of a kind, for a reader; a status is for all readers ("").
func (r *Keyring) Sign(kind Kind, m *Message, reader string) error {
	m.Sig, m.Kid = "", ""
	key, ok := r.shared[reader]
	if !ok && r.own != nil && r.own.canSign() {
		key, ok = *r.own, true
	}
	if !ok {
		if r.required && reader != "" {
			return fmt.Errorf("%w: there is no key to sign with for %s", ErrUnknownKey, reader)
		}
		return nil
	}
	text, err := Canonical(r.prefix, kind, m, r.name, reader)
	if err != nil {
		return err
	}
	m.Sig, m.Kid = base64.StdEncoding.EncodeToString(key.sign(text)), key.Kid
	return nil
}

// Check refuses what `by` did not write, for us and for this place.
func (r *Keyring) Check(kind Kind, m *Message, by string) error {
	if m.Sig == "" {
		if r.required {
			return fmt.Errorf("%w: %s did not sign this, and here everything must be signed", ErrUnsigned, by)
		}
		return nil
	}
	key, ok := r.believed[[2]string{by, m.Kid}]
	if !ok {
		if r.required {
			return fmt.Errorf("%w: key %.40q is not trusted as one of %s", ErrUnknownKey, m.Kid, by)
		}
		return nil // as good as unsigned: who meant harm would have left the signature out
	}
	us := r.name
	if kind == Status {
		us = ""
	}
	signature, _ := base64.StdEncoding.Strict().DecodeString(m.Sig)
	text, err := Canonical(r.prefix, kind, m, by, us)
	if err != nil || !key.verify(signature, text) {
		return fmt.Errorf("%w: the signature is not one of %s on this message for %s", ErrForged, by, us)
	}
	if kind == Pending && (m.Sender != by || (m.Receiver != "" && m.Receiver != us)) {
		return fmt.Errorf("%w: it was signed for other names", ErrForged)
	}
	return nil
}

// Canonical is what is signed: every field with a meaning, each led by its length.
func Canonical(prefix string, kind Kind, m *Message, signer, reader string) ([]byte, error) {
	fields := []string{signedFormat, prefix, string(kind), signer, reader}
	number := func(n int64) string { return strconv.FormatInt(n, 10) }
	var content json.RawMessage
	switch kind {
	case Pending:
		fields = append(fields, m.MsgID, m.Action, number(m.Time), number(m.Exp))
		content = m.Payload
	case Ack:
		fields, content = append(fields, m.MsgID), m.Progress
	case Complete:
		fields, content = append(fields, m.MsgID), m.Value
	case Failed:
		fields, content = append(fields, m.MsgID), m.Error
	case Status:
		online := ""
		if m.Online != nil {
			online = map[bool]string{false: "0", true: "1"}[*m.Online]
		}
		fields = append(fields, number(m.Time), online, optionalNumber(m.Battery), optionalNumber(m.RSSI), m.IP,
			m.Version, number(m.Uptime), m.Session)
		content = m.Data
	}
	tagged, err := tag(content, m.Enc)
	if err != nil {
		return nil, err
	}
	fields = append(fields, tagged)
	if kind == Pending && len(m.Order) > 0 {
		fields = append(fields, string(m.Order))
	}
	if kind == Status && m.Heartbeat > 0 {
		fields = append(fields, number(int64(m.Heartbeat*1000)))
	}
	var out []byte
	for _, field := range fields {
		out = binary.BigEndian.AppendUint32(out, uint32(len(field)))
		out = append(out, field...)
	}
	return out, nil
}

// tag writes a content as the JSON it is, independent of how a string is escaped.
func tag(raw json.RawMessage, enc string) (string, error) {
	if len(raw) == 0 || string(raw) == "null" {
		return "n", nil
	}
	if raw[0] != '"' {
		return "j" + string(raw), nil
	}
	var text string
	if err := json.Unmarshal(raw, &text); err != nil {
		return "", err
	}
	content, err := ReadContent(raw, "", enc)
	switch {
	case err != nil:
		return "", err
	case content.Sure && content.Form == Base64:
		return "b" + text, nil
	case content.Sure:
		return "t" + text, nil
	}
	return "s" + text, nil
}

func optionalNumber(n *int) string {
	if n == nil {
		return ""
	}
	return strconv.Itoa(*n)
}
