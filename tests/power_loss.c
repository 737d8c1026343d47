/* Keeps apart what a program has written and what it has flushed, for files in one folder.

   LD_PRELOAD this library with DULY_POWER_FOLDER (whose files are watched) and DULY_POWER_LOG (a folder elsewhere).
   Each write first appends the old content of its sectors to DULY_POWER_LOG/log, each flush says so there. After
   a kill, tests/power_loss.py puts back what was not flushed. Nothing is really flushed: a killed process leaves
   its writes with the operating system, and what a loss of power would leave is worked out from the log. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define SECTOR 512
#define DESCRIPTORS 65536
#define FLUSH_MICROSECONDS 3000 /* about what a disk takes: most kills come while one waits for it */

static char *paths[DESCRIPTORS];
static char folder[PATH_MAX], log_folder[PATH_MAX];
static int log_fd = -1;
static unsigned removed;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int (*real_open)(const char *, int, ...);
static int (*real_openat)(int, const char *, int, ...);
static int (*real_close)(int);
static ssize_t (*real_write)(int, const void *, size_t);
static ssize_t (*real_pwrite)(int, const void *, size_t, off_t);
static int (*real_ftruncate)(int, off_t);
static int (*real_fsync)(int);
static int (*real_unlink)(const char *);
static int (*real_rename)(const char *, const char *);

/* Begin to watch, once the environment says what. A program that was split off by a fork server learns it after
   this library was loaded (tests/fork_server.py), so each open asks again until then. */
static void arm(void) {
    const char *watched = getenv("DULY_POWER_FOLDER"), *to = getenv("DULY_POWER_LOG");
    if (log_fd >= 0 || !watched || !to) return;
    pthread_mutex_lock(&lock);
    char name[PATH_MAX + 8];
    if (log_fd < 0 && realpath(watched, folder) && realpath(to, log_folder)) {
        snprintf(name, sizeof name, "%s/log", log_folder);
        log_fd = real_open(name, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    }
    pthread_mutex_unlock(&lock);
}

__attribute__((constructor)) static void begin(void) {
    real_open = dlsym(RTLD_NEXT, "open64");
    real_openat = dlsym(RTLD_NEXT, "openat64");
    real_close = dlsym(RTLD_NEXT, "close");
    real_write = dlsym(RTLD_NEXT, "write");
    real_pwrite = dlsym(RTLD_NEXT, "pwrite64");
    real_ftruncate = dlsym(RTLD_NEXT, "ftruncate64");
    real_fsync = dlsym(RTLD_NEXT, "fsync");
    real_unlink = dlsym(RTLD_NEXT, "unlink");
    real_rename = dlsym(RTLD_NEXT, "rename");
    arm();
}

/* One entry: its kind, an offset, the file's size, and two lengths; then the path, then the content. */
static void note(char kind, const char *path, uint64_t offset, uint64_t size, const void *data, uint32_t length) {
    struct __attribute__((packed)) {
        char kind;
        uint64_t offset, size;
        uint32_t path_length, length;
    } head = {kind, offset, size, strlen(path), length};
    struct iovec parts[] = {{&head, sizeof head}, {(void *)path, head.path_length}, {(void *)data, length}};
    if (log_fd < 0 || writev(log_fd, parts, 3) != (ssize_t)(sizeof head + head.path_length + length)) abort();
}

static int watched(const char *path) {
    size_t length = strlen(folder);
    const char *end = path + strlen(path);
    return log_fd >= 0 && !strncmp(path, folder, length) && (path[length] == '/' || !path[length]) &&
           !(end - path > 4 && !strcmp(end - 4, "-shm"));
}

static const char *path_of(int fd) { return fd >= 0 && fd < DESCRIPTORS ? paths[fd] : NULL; }

static void full_path(const char *path, char *full) {
    char parent[PATH_MAX], copy[PATH_MAX];
    snprintf(copy, sizeof copy, "%s", path);
    char *slash = strrchr(copy, '/');
    if (slash) *slash = 0;
    if (!realpath(!slash ? "." : *copy ? copy : "/", parent)) *parent = 0;
    snprintf(full, PATH_MAX, "%s/%s", parent, slash ? slash + 1 : copy);
}

static int opened(int fd, const char *path, int flags, int existed) {
    if (fd < 0 || fd >= DESCRIPTORS || log_fd < 0) return fd;
    char full[PATH_MAX];
    struct stat found;
    if (!fstat(fd, &found) && S_ISDIR(found.st_mode)) {
        if (!realpath(path, full)) return fd;
    } else {
        full_path(path, full);
    }
    if (!watched(full)) return fd;
    pthread_mutex_lock(&lock);
    free(paths[fd]);
    paths[fd] = strdup(full);
    if (!existed && (flags & O_CREAT)) note('C', full, 0, 0, "", 0);
    pthread_mutex_unlock(&lock);
    return fd;
}

static int exists(const char *path) {
    int kept = errno, there = !access(path, F_OK);
    errno = kept;
    return there;
}

#define MODE(flags)                                                                                                    \
    mode_t mode = 0;                                                                                                   \
    if ((flags) & (O_CREAT | O_TMPFILE)) {                                                                             \
        va_list more;                                                                                                  \
        va_start(more, flags);                                                                                         \
        mode = va_arg(more, mode_t);                                                                                   \
        va_end(more);                                                                                                  \
    }

int open64(const char *path, int flags, ...) {
    MODE(flags)
    arm();
    int existed = exists(path);
    return opened(real_open(path, flags, mode), path, flags, existed);
}
int open(const char *path, int flags, ...) {
    MODE(flags)
    arm();
    int existed = exists(path);
    return opened(real_open(path, flags, mode), path, flags, existed);
}
int openat64(int at, const char *path, int flags, ...) {
    MODE(flags)
    arm();
    int existed = exists(path);
    return opened(real_openat(at, path, flags, mode), path, flags, existed);
}
int openat(int at, const char *path, int flags, ...) {
    MODE(flags)
    arm();
    int existed = exists(path);
    return opened(real_openat(at, path, flags, mode), path, flags, existed);
}

int close(int fd) {
    if (fd >= 0 && fd < DESCRIPTORS && paths[fd]) {
        pthread_mutex_lock(&lock);
        free(paths[fd]);
        paths[fd] = NULL;
        pthread_mutex_unlock(&lock);
    }
    return real_close(fd);
}

/* Note the sectors of a range as they are. A descriptor that cannot read is opened anew for that. */
static void keep(int fd, const char *path, off_t start, size_t length) {
    struct stat found;
    if (fstat(fd, &found) || !length) return;
    off_t first = start / SECTOR * SECTOR, end = (start + (off_t)length + SECTOR - 1) / SECTOR * SECTOR;
    char *old = calloc(1, end - first);
    int reading = real_open(path, O_RDONLY | O_CLOEXEC);
    if (reading >= 0) {
        if (pread(reading, old, end - first, first) < 0) memset(old, 0, end - first);
        real_close(reading);
    }
    note('W', path, first, found.st_size, old, end - first);
    free(old);
}

ssize_t pwrite64(int fd, const void *data, size_t length, off_t offset) {
    const char *path = path_of(fd);
    if (!path) return real_pwrite(fd, data, length, offset);
    pthread_mutex_lock(&lock);
    keep(fd, path, offset, length);
    ssize_t done = real_pwrite(fd, data, length, offset);
    pthread_mutex_unlock(&lock);
    return done;
}
ssize_t pwrite(int fd, const void *data, size_t length, off_t offset) { return pwrite64(fd, data, length, offset); }

ssize_t write(int fd, const void *data, size_t length) {
    const char *path = path_of(fd);
    if (!path) return real_write(fd, data, length);
    pthread_mutex_lock(&lock);
    int flags = fcntl(fd, F_GETFL);
    keep(fd, path, lseek(fd, 0, flags & O_APPEND ? SEEK_END : SEEK_CUR), length);
    ssize_t done = real_write(fd, data, length);
    pthread_mutex_unlock(&lock);
    return done;
}

int ftruncate64(int fd, off_t size) {
    const char *path = path_of(fd);
    if (!path) return real_ftruncate(fd, size);
    pthread_mutex_lock(&lock);
    struct stat found;
    if (!fstat(fd, &found) && found.st_size > size)
        keep(fd, path, size, found.st_size - size);
    else
        note('W', path, 0, found.st_size, "", 0);
    int done = real_ftruncate(fd, size);
    pthread_mutex_unlock(&lock);
    return done;
}
int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }

static int flush(int fd) {
    const char *path = path_of(fd);
    if (!path) return real_fsync(fd);
    usleep(FLUSH_MICROSECONDS);
    pthread_mutex_lock(&lock);
    struct stat found = {0};
    fstat(fd, &found);
    note(S_ISDIR(found.st_mode) ? 'D' : 'S', path, 0, found.st_size, "", 0);
    pthread_mutex_unlock(&lock);
    return 0;
}
int fsync(int fd) { return flush(fd); }
int fdatasync(int fd) { return flush(fd); }

/* What is removed lives on in the log's folder: without a flush of its folder it may come back. */
int unlink(const char *path) {
    char full[PATH_MAX], kept[PATH_MAX + 32], number[16];
    full_path(path, full);
    if (!watched(full)) return real_unlink(path);
    pthread_mutex_lock(&lock);
    snprintf(number, sizeof number, "%u-%u", (unsigned)getpid() % 100000, removed++ % 10000);
    snprintf(kept, sizeof kept, "%s/removed-%s", log_folder, number);
    if (!link(full, kept)) note('U', full, 0, 0, number, strlen(number));
    int done = real_unlink(path);
    pthread_mutex_unlock(&lock);
    return done;
}

int rename(const char *from, const char *to) {
    char full[PATH_MAX], target[PATH_MAX];
    full_path(from, full);
    full_path(to, target);
    int done = real_rename(from, to);
    if (!done && watched(target)) {
        pthread_mutex_lock(&lock);
        note('R', full, 0, 0, target, strlen(target));
        pthread_mutex_unlock(&lock);
    }
    return done;
}
