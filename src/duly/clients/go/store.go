package duly

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"log"
	"os"
	"path/filepath"
	"sync"
	"time"
)

const (
	roomAtLeast = 4 << 20 // bytes of a file before it is written anew
	groupLimit  = 1000    // changes that are flushed together
)

// ErrClosed says that a node was closed.
var ErrClosed = errors.New("the node was closed; what is stored goes on at its next start")

// change puts an entry into the store, or removes it (nil).
type change struct {
	Key   string          `json:"k"`
	Value json.RawMessage `json:"v,omitempty"`
}

type commit struct {
	changes []change
	done    func()
}

// store keeps a node's memory in a file of lines, each with its checksum. What was committed is there after kill -9
// and a power cut; a last line that is not whole was never promised, and is cut off. Commits that wait are flushed
// together, and what follows them is done in order. Without a path everything ends with the process.
type store struct {
	path    string
	file    *os.File
	lock    io.Closer
	size    int64
	room    int64
	entries map[string]json.RawMessage

	mu      sync.Mutex
	more    *sync.Cond
	waiting []commit
	closed  bool
	ended   chan struct{}
}

func openStore(path string) (*store, error) {
	s := &store{path: path, entries: map[string]json.RawMessage{}, room: roomAtLeast, ended: make(chan struct{})}
	s.more = sync.NewCond(&s.mu)
	if path == "" {
		return s, nil
	}
	var err error
	if s.lock, err = lockFile(path + ".lock"); err != nil {
		return nil, fmt.Errorf("%s is in use by another process; give each node its own file: %w", path, err)
	}
	if s.file, err = os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600); err == nil {
		err = s.read()
	}
	if err != nil {
		s.lock.Close()
		return nil, err
	}
	return s, nil
}

func (s *store) read() error {
	reader := bufio.NewReaderSize(s.file, 1<<20)
	for {
		line, err := reader.ReadBytes('\n')
		if err != nil {
			break // the rest, if there is any, is not whole
		}
		changes, err := parseLine(line)
		if err != nil {
			if _, err := reader.ReadByte(); err == nil {
				return fmt.Errorf("%s is damaged in its middle; put a copy in its place, or move it away", s.path)
			}
			break
		}
		s.apply(changes)
		s.size += int64(len(line))
	}
	if err := s.file.Truncate(s.size); err != nil {
		return err
	}
	_, err := s.file.Seek(s.size, io.SeekStart)
	return err
}

func (s *store) apply(changes []change) {
	for _, c := range changes {
		if c.Value == nil {
			delete(s.entries, c.Key)
		} else {
			s.entries[c.Key] = c.Value
		}
	}
}

// put queues a commit; `done` is called once it is flushed, in the order of the commits.
func (s *store) put(changes []change, done func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return
	}
	s.waiting = append(s.waiting, commit{changes, done})
	s.more.Signal()
}

// run flushes commits until the store is closed.
func (s *store) run() {
	defer close(s.ended)
	for {
		s.mu.Lock()
		for len(s.waiting) == 0 && !s.closed {
			s.more.Wait()
		}
		if s.closed {
			s.mu.Unlock()
			return
		}
		group := s.waiting[:min(len(s.waiting), groupLimit)]
		s.waiting = s.waiting[len(group):]
		s.mu.Unlock()
		var changes []change
		for _, one := range group {
			changes = append(changes, one.changes...)
		}
		if !s.flush(changes) {
			return
		}
		for _, one := range group {
			if one.done != nil {
				one.done()
			}
		}
	}
}

// flush writes changes to the disk, and tries again until it can: nothing is confirmed before.
func (s *store) flush(changes []change) bool {
	if len(changes) == 0 {
		return true
	}
	for pause := 100 * time.Millisecond; s.file != nil; pause = min(2*pause, 5*time.Second) {
		err := s.append(changes)
		if err == nil {
			break
		}
		log.Printf("duly: %s cannot be written, and nothing is confirmed until it can: %v", s.path, err)
		time.Sleep(pause)
		s.mu.Lock()
		closed := s.closed
		s.mu.Unlock()
		if closed {
			return false
		}
	}
	s.apply(changes)
	if s.size > s.room {
		if err := s.writeAnew(); err != nil {
			log.Printf("duly: %s cannot be written anew: %v", s.path, err)
			s.room = 2 * s.size
		}
	}
	return true
}

func (s *store) append(changes []change) error {
	line, err := formatLine(changes)
	if err != nil {
		return err
	}
	if _, err = s.file.WriteAt(line, s.size); err == nil {
		err = s.file.Sync()
	}
	if err != nil {
		_ = s.file.Truncate(s.size)
		return err
	}
	s.size += int64(len(line))
	return nil
}

// writeAnew replaces the file by one with the present entries only.
func (s *store) writeAnew() error {
	beside := s.path + ".new"
	file, err := os.OpenFile(beside, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	var size int64
	var part []change
	flush := func() error {
		line, err := formatLine(part)
		if err == nil && len(part) > 0 {
			_, err = file.WriteAt(line, size)
			size += int64(len(line))
		}
		part = part[:0]
		return err
	}
	for key, value := range s.entries {
		if part = append(part, change{key, value}); len(part) == groupLimit {
			if err = flush(); err != nil {
				break
			}
		}
	}
	if err == nil {
		err = flush()
	}
	if err == nil {
		err = file.Sync()
	}
	if err == nil {
		err = os.Rename(beside, s.path)
	}
	if err != nil {
		file.Close()
		return err
	}
	if folder, err := os.Open(filepath.Dir(s.path)); err == nil {
		_ = folder.Sync()
		folder.Close()
	}
	s.file.Close()
	s.file, s.size, s.room = file, size, max(roomAtLeast, 2*size)
	return nil
}

func (s *store) close() {
	s.mu.Lock()
	s.closed = true
	s.more.Signal()
	s.mu.Unlock()
	<-s.ended
	if s.file != nil {
		s.file.Close()
		s.lock.Close()
	}
}

func formatLine(changes []change) ([]byte, error) {
	body, err := json.Marshal(changes)
	if err != nil {
		return nil, err
	}
	return fmt.Appendf(nil, "%08x %s\n", crc32.ChecksumIEEE(body), body), nil
}

func parseLine(line []byte) (changes []change, err error) {
	sum, body, found := bytes.Cut(bytes.TrimSuffix(line, []byte("\n")), []byte(" "))
	if !found || string(sum) != fmt.Sprintf("%08x", crc32.ChecksumIEEE(body)) {
		return nil, errors.New("a line that is not whole")
	}
	return changes, json.Unmarshal(body, &changes)
}
