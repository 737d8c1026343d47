package main

import (
	"encoding/hex"
	"log"
	"strings"

	"duly"
)

// options of the node, by the flags.
func options() duly.Options {
	found := duly.Options{URL: *url, Prefix: *prefix, Store: *store, ResendFirst: *resend, Concurrency: *atOnce}
	if *secret != "" {
		bytes, err := hex.DecodeString(*secret)
		if err != nil {
			log.Fatal(err)
		}
		key, err := duly.NewKey(bytes)
		if err != nil {
			log.Fatal(err)
		}
		found.Key = &key
	}
	if *trusted != "" {
		name, text, _ := strings.Cut(*trusted, "=")
		key, err := duly.ReadKey(text)
		if err != nil {
			log.Fatal(err)
		}
		found.Trusted, found.Signed = map[string][]duly.Key{name: {key}}, true
	}
	return found
}
