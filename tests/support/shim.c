/* Faults of the operating system, for a process that loads this before its libraries (LD_PRELOAD).

   ROOFTOP_FAULT_EIO=FIRST:COUNT:PATH  of the writes and syncs of files below PATH, those from FIRST on, COUNT of them,
                                       fail with EIO; the file ROOFTOP_FAULT_HIT is made at the first one
   ROOFTOP_FAULT_CLOCK=SEED            the clock of the day jumps by up to two days, back and forth, every so many reads
                                       (the monotonic clock, which no jump moves, stays)
   Without them, or before they are set, nothing is changed. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define READS_A_JUMP 50
#define MOST_S 172800

static atomic_long operations, reads;

static int fails(int file) {
    const char *fault = getenv("ROOFTOP_FAULT_EIO");
    long first, count;
    int begin = 0;
    char name[64], path[4096];
    if (!fault || sscanf(fault, "%ld:%ld:%n", &first, &count, &begin) != 2 || !begin) return 0;
    snprintf(name, sizeof name, "/proc/self/fd/%d", file);
    ssize_t length = readlink(name, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    if (strncmp(path, fault + begin, strlen(fault + begin))) return 0;
    long number = atomic_fetch_add(&operations, 1);
    if (number < first || number >= first + count) return 0;
    const char *hit = getenv("ROOFTOP_FAULT_HIT");
    if (hit) close(open(hit, O_CREAT | O_WRONLY, 0600));
    return 1;
}

/* The function that this one hides. */
#define FIND(name) \
    if (!real) real = (typeof(real))dlsym(RTLD_NEXT, #name)
#define FAILING(type, name, parameters, arguments) \
    type name parameters { \
        static typeof(&name) real; \
        if (fails(file)) { \
            errno = EIO; \
            return -1; \
        } \
        FIND(name); \
        return real arguments; \
    }

FAILING(ssize_t, write, (int file, const void *data, size_t bytes), (file, data, bytes))
FAILING(ssize_t, pwrite, (int file, const void *data, size_t bytes, off_t at), (file, data, bytes, at))
FAILING(ssize_t, pwrite64, (int file, const void *data, size_t bytes, off64_t at), (file, data, bytes, at))
FAILING(ssize_t, writev, (int file, const struct iovec *parts, int count), (file, parts, count))
FAILING(int, fsync, (int file), (file))
FAILING(int, fdatasync, (int file), (file))

static long jump(void) {
    const char *seed = getenv("ROOFTOP_FAULT_CLOCK");
    if (!seed) return 0;
    unsigned long long draw = strtoull(seed, NULL, 10) + atomic_fetch_add(&reads, 1) / READS_A_JUMP;
    /* SplitMix64, by Sebastiano Vigna. */
    draw += 0x9e3779b97f4a7c15ull;
    draw = (draw ^ (draw >> 30)) * 0xbf58476d1ce4e5b9ull;
    draw = (draw ^ (draw >> 27)) * 0x94d049bb133111ebull;
    draw ^= draw >> 31;
    return (long)(draw % (2 * MOST_S + 1)) - MOST_S;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static typeof(&clock_gettime) real;
    FIND(clock_gettime);
    int status = real(clock, now);
    if (!status && clock == CLOCK_REALTIME) now->tv_sec += jump();
    return status;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    static int (*real)(struct timeval *, void *);
    FIND(gettimeofday);
    int status = real(now, zone);
    if (!status) now->tv_sec += jump();
    return status;
}

time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}
