package duly

import (
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"sync"
	"time"
)

// ids mints version 7 UUIDs that sort in the order they were made.
type ids struct {
	mu   sync.Mutex
	last uint64 // milliseconds, and a counter of 12 bits
}

func (i *ids) next(now time.Time) string {
	var random [8]byte
	_, _ = rand.Read(random[:])
	i.mu.Lock()
	defer i.mu.Unlock()
	i.last = max(i.last+1, uint64(now.UnixMilli())<<12)
	var id [16]byte
	binary.BigEndian.PutUint64(id[:], i.last>>12<<16|0x7000|i.last&0xfff)
	copy(id[8:], random[:])
	id[8] = id[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", id[:4], id[4:6], id[6:8], id[8:10], id[10:])
}

func randomHex(bytes int) string {
	random := make([]byte, bytes)
	_, _ = rand.Read(random)
	return hex.EncodeToString(random)
}
