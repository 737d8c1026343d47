package duly

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func write1(t *testing.T, s *store, key, value string) {
	t.Helper()
	done := make(chan struct{})
	s.put([]change{put(key, value), put("last", key)}, func() { close(done) })
	<-done
}

func open(t *testing.T, path string) *store {
	t.Helper()
	s, err := openStore(path)
	if err != nil {
		t.Fatal(err)
	}
	go s.run()
	return s
}

func TestAFileThatIsCutAtAnyByteHoldsWhatWasWrittenBefore(t *testing.T) {
	path := filepath.Join(t.TempDir(), "store")
	s := open(t, path)
	sizes := []int64{0}
	for _, key := range []string{"a", "b", "c"} {
		write1(t, s, key, "锁")
		sizes = append(sizes, s.size)
	}
	s.close()
	whole, _ := os.ReadFile(path)
	for size := range int64(len(whole)) + 1 {
		if err := os.WriteFile(path, whole[:size], 0o600); err != nil {
			t.Fatal(err)
		}
		want := 0
		for want < 3 && sizes[want+1] <= size {
			want++
		}
		s := open(t, path)
		entries := want
		if want > 0 {
			entries++ // and which was the last
		}
		if len(s.entries) != entries {
			t.Fatalf("cut at %d it has %d entries, not %d", size, len(s.entries), entries)
		}
		if size%20 == 0 {
			write1(t, s, "more", "x")
		}
		s.close()
		if again := open(t, path); size%20 == 0 && string(again.entries["more"]) != `"x"` {
			t.Fatal("what was written after the cut is not there")
		} else {
			again.close()
		}
	}
}

func TestAFileThatIsDamagedInItsMiddleIsNotUsed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "store")
	s := open(t, path)
	write1(t, s, "a", "1")
	write1(t, s, "b", "2")
	s.close()
	text, _ := os.ReadFile(path)
	text[12] ^= 1
	_ = os.WriteFile(path, text, 0o600)
	if _, err := openStore(path); err == nil || !strings.Contains(err.Error(), "damaged") {
		t.Fatal(err)
	}
}

func TestTwoNodesOnOneFileAreRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "store")
	s := open(t, path)
	if _, err := openStore(path); err == nil || !strings.Contains(err.Error(), "in use") {
		t.Fatal(err)
	}
	s.close()
	open(t, path).close()
}

func TestAFileDoesNotGrowForEver(t *testing.T) {
	path := filepath.Join(t.TempDir(), "store")
	s := open(t, path)
	value := strings.Repeat("x", 1<<20)
	for range 8 {
		write1(t, s, "same", value)
	}
	s.close()
	if about, _ := os.Stat(path); about.Size() > roomAtLeast+2<<20 {
		t.Fatal(about.Size())
	}
	again := open(t, path)
	defer again.close()
	if len(again.entries["same"]) != len(value)+2 {
		t.Fatal("it is gone")
	}
}

func TestWithoutAPathItIsForgotten(t *testing.T) {
	s := open(t, "")
	write1(t, s, "a", "1")
	s.close()
}

var testTime = time.UnixMilli(1700000000000)

func TestIdsRise(t *testing.T) {
	var made ids
	last := ""
	for range 5000 {
		id := made.next(testTime)
		if id <= last || len(id) != 36 || id[14] != '7' {
			t.Fatalf("%s after %s", id, last)
		}
		last = id
	}
}
