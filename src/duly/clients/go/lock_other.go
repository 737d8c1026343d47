//go:build !unix

package duly

import (
	"io"
	"os"
)

// lockFile opens a file for this process; on Windows no other can open it for writing then.
func lockFile(path string) (io.Closer, error) {
	return os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
}
