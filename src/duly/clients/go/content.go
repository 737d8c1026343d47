package duly

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"regexp"
	"unicode/utf8"
)

// Form is how a peer writes bytes.
type Form string

// The forms. The protocol's own structs have bytes, which are base64 in JSON; its examples write plain JSON.
const (
	Base64 Form = "base64"
	JSON   Form = "json"
)

// Content is the bytes of a payload, a value or an error.
type Content struct {
	Bytes []byte          // what is meant
	Form  Form            // how the peer wrote it; empty if that does not show
	Raw   json.RawMessage // as it stood on the wire
	Sure  bool            // the message itself says in which form it is written
}

var (
	capitals = regexp.MustCompile(`[A-Z]`)
	smalls   = regexp.MustCompile(`[a-z]`)
	digits   = regexp.MustCompile(`[0-9+/=]`)
	control  = regexp.MustCompile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
)

// ReadContent says what the JSON text of a field means. `known` is the form in which its peer is known to write,
// `enc` what the message says of itself.
func ReadContent(raw json.RawMessage, known Form, enc string) (Content, error) {
	sure := enc == string(Base64) || enc == string(JSON)
	if sure {
		known = Form(enc)
	}
	switch {
	case len(raw) == 0:
		return Content{}, nil
	case string(raw) == "null":
		return Content{Raw: raw}, nil
	case raw[0] != '"':
		return Content{Bytes: raw, Form: JSON, Raw: raw, Sure: sure}, nil
	}
	var text string
	if err := json.Unmarshal(raw, &text); err != nil {
		return Content{}, fmt.Errorf("%w: %v", ErrMalformed, err)
	}
	if text == "" {
		return Content{Raw: raw}, nil
	}
	if known != JSON {
		decoded, err := base64.StdEncoding.Strict().DecodeString(text)
		strict := err == nil && base64.StdEncoding.EncodeToString(decoded) == text
		if strict && (known == Base64 || seemsBase64(text, decoded)) {
			return Content{Bytes: decoded, Form: Base64, Raw: raw, Sure: sure}, nil
		}
	}
	return Content{Bytes: []byte(text), Form: JSON, Raw: raw, Sure: sure}, nil
}

// seemsBase64 says whether a string that could be base64 is more likely that than a word.
func seemsBase64(text string, decoded []byte) bool {
	if len(text) >= 16 && capitals.MatchString(text) && smalls.MatchString(text) && digits.MatchString(text) {
		return true
	}
	return utf8.Valid(decoded) && !control.Match(decoded)
}

// Decode reads the content as JSON into a value.
func (c Content) Decode(into any) error {
	return json.Unmarshal(c.Bytes, into)
}

func (c Content) String() string { return string(c.Bytes) }

// write puts a value into the form in which it goes out: bytes as they are, anything else as its JSON.
func write(value any, form Form) (Content, error) {
	switch v := value.(type) {
	case nil:
		return Content{Raw: json.RawMessage("null")}, nil
	case Content:
		return write(v.Bytes, form)
	case []byte:
		return Content{Bytes: v, Form: form, Raw: spelled(v, form)}, nil
	case string:
		raw, err := encodeJSON(v)
		if err != nil || form == JSON {
			return Content{Bytes: []byte(v), Form: JSON, Raw: raw}, err
		}
		data := []byte(v)
		if len(data) == 0 || json.Valid(data) {
			data = raw // a number and its digits stay apart
		}
		return Content{Bytes: data, Form: Base64, Raw: spelled(data, Base64)}, nil
	default:
		data, err := encodeJSON(v)
		return Content{Bytes: data, Form: form, Raw: spelled(data, form)}, err
	}
}

// spelled writes bytes in a form. In JSON, what spells a value is that value and other text a string; bytes that
// are no text have to be base64 even so.
func spelled(data []byte, form Form) json.RawMessage {
	if len(data) == 0 {
		return json.RawMessage("null")
	}
	if form == JSON {
		value := bytes.TrimSpace(data)
		if len(value) > 0 && value[0] != '"' && value[0] != 'n' && json.Valid(value) {
			return value
		}
		if utf8.Valid(data) {
			raw, _ := encodeJSON(string(data))
			return raw
		}
	}
	raw, _ := encodeJSON(base64.StdEncoding.EncodeToString(data))
	return raw
}

// mark says in the message that a string is base64: only that can be taken for something else.
func mark(content Content) string {
	if content.Form == Base64 && len(content.Raw) > 0 && content.Raw[0] == '"' {
		return string(Base64)
	}
	return ""
}
