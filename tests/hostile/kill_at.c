/* A library for LD_PRELOAD. It counts the system calls of a process that change files in some folders, and kills the
 * process at one of them: before the call, or after half of a write. The count is in a shared file: 8 bytes with the
 * number of calls, then one letter per call. Variables:
 *
 * KILL_PID    the id of the process; its children are neither counted nor killed
 * KILL_BELOW  the folders, separated by ':'
 * KILL_COUNT  the shared file
 * KILL_AT     the number of the call to kill the process at, from 1; 0: only count
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define COUNT_BYTES (1 << 20)
static char *shared;

static int is_below(const char *path) {
    const char *folders = getenv("KILL_BELOW");
    size_t length;
    for (; folders && *folders; folders += length + (folders[length] == ':')) {
        length = strcspn(folders, ":");
        if (length && !strncmp(path, folders, length) && (path[length] == '/' || !path[length])) return 1;
    }
    return 0;
}

/* Count a call. Whether it is the call to kill the process at. */
static int count_call(char kind, const char *path) {
    const char *pid = getenv("KILL_PID"), *file = getenv("KILL_COUNT"), *at = getenv("KILL_AT");
    if (!pid || !file || !at || atol(pid) != getpid() || !is_below(path)) return 0;
    if (!shared) {
        int descriptor = open(file, O_RDWR | O_CREAT, 0600);
        if (descriptor < 0 || ftruncate(descriptor, COUNT_BYTES)) abort();
        shared = mmap(0, COUNT_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
        if (shared == MAP_FAILED) abort();
        close(descriptor);
    }
    long number = __atomic_add_fetch((long *)shared, 1, __ATOMIC_SEQ_CST);
    if (number + 8 < COUNT_BYTES) shared[7 + number] = kind;
    return number == atol(at);
}

static void die(void) { kill(getpid(), SIGKILL); pause(); }

static const char *resolve(int folder, const char *path, char *buffer) {
    if (path[0] == '/') return path;
    char link[64];
    if (folder == AT_FDCWD) { if (!getcwd(buffer, PATH_MAX)) return path; }
    else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        ssize_t length = readlink(link, buffer, PATH_MAX - 1);
        if (length < 0) return path;
        buffer[length] = 0;
    }
    size_t used = strlen(buffer);
    snprintf(buffer + used, PATH_MAX * 2 - used, "/%s", path);
    return buffer;
}

#define NEXT(name) static __typeof__(name) *next; if (!next) next = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)
#define AT_PATH(kind, folder, path) \
    char buffer[PATH_MAX * 2]; \
    if (count_call(kind, resolve(folder, path, buffer))) die()

int rename(const char *from, const char *to) { NEXT(rename); AT_PATH('r', AT_FDCWD, to); return next(from, to); }
int renameat(int f, const char *from, int t, const char *to) {
    NEXT(renameat); AT_PATH('r', t, to); return next(f, from, t, to);
}
int unlink(const char *path) { NEXT(unlink); AT_PATH('u', AT_FDCWD, path); return next(path); }
int unlinkat(int f, const char *path, int flags) { NEXT(unlinkat); AT_PATH('u', f, path); return next(f, path, flags); }
int rmdir(const char *path) { NEXT(rmdir); AT_PATH('u', AT_FDCWD, path); return next(path); }
int link(const char *from, const char *to) { NEXT(link); AT_PATH('l', AT_FDCWD, to); return next(from, to); }
int linkat(int f, const char *from, int t, const char *to, int flags) {
    NEXT(linkat); AT_PATH('l', t, to); return next(f, from, t, to, flags);
}
int mkdir(const char *path, mode_t mode) { NEXT(mkdir); AT_PATH('m', AT_FDCWD, path); return next(path, mode); }
int fsync(int descriptor) { NEXT(fsync); AT_PATH('f', descriptor, ""); return next(descriptor); }
ssize_t write(int descriptor, const void *bytes, size_t size) {
    NEXT(write);
    if (descriptor > 2) {
        char buffer[PATH_MAX * 2];
        if (count_call('w', resolve(descriptor, "", buffer))) { next(descriptor, bytes, size / 2); die(); }
    }
    return next(descriptor, bytes, size);
}
