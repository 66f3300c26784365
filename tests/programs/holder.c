/* Processes that hold the lock of their own address space for as long as they like, by a file whose server does not answer.

   holder serve DIR       mounts a file system at DIR (as root) whose file `mute` can be mapped and is never read to an end
   holder hold DIR N MIB  N processes: each fills MIB MiB, says so, and holds its lock
   holder exec DIR N MIB  N processes: each says so, executes the file in one thread, and maps and fills MIB MiB again and again in another
   holder switch DIR      says so, and executes a program; from then on the memory that it had is held

   A read of /proc/self/mem faults the mapped page in with the lock held, and waits for the server. A thread that maps memory then waits for
   the lock to write, and all that want to read it wait behind that thread. While the file is executed, no thread of its process can be
   traced. A process that cannot leave its memory for that of the program that it executes holds up all that ask whose memory it has (kcmp),
   or read its /proc/PID/stat. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static void die(const char *what)
{
    perror(what);
    exit(1);
}

static void answer(int fuse, uint64_t unique, int error, const void *data, size_t size)
{
    char buffer[4096];
    struct fuse_out_header header = {.len = sizeof header + size, .error = error, .unique = unique};
    memcpy(buffer, &header, sizeof header);
    if (size)
        memcpy(buffer + sizeof header, data, size);
    if (write(fuse, buffer, header.len) < 0 && errno != ENOENT)
        die("write to fuse");
}

static struct fuse_attr attributes(uint64_t node)
{
    struct fuse_attr attr = {.ino = node, .nlink = 1, .blksize = 4096, .mode = node == 1 ? S_IFDIR | 0755 : S_IFREG | 0755};
    attr.size = node == 1 ? 0 : 1 << 20;
    return attr;
}

/* Answers everything but a read. */
static int serve(const char *directory)
{
    int fuse = open("/dev/fuse", O_RDWR);
    char options[128];
    if (fuse < 0)
        die("/dev/fuse");
    snprintf(options, sizeof options, "fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other", fuse);
    if (mount("holder", directory, "fuse", MS_NOSUID | MS_NODEV, options))
        die("mount");
    puts("ready");
    fflush(stdout);
    static char buffer[1 << 20];
    for (;;) {
        ssize_t len = read(fuse, buffer, sizeof buffer);
        if (len < 0) {
            if (errno == EINTR || errno == ENOENT)
                continue;
            return 0;
        }
        struct fuse_in_header *in = (void *)buffer;
        switch (in->opcode) {
        case FUSE_INIT: {
            struct fuse_init_out out = {.major = FUSE_KERNEL_VERSION, .minor = 31, .max_readahead = 4096, .max_write = 4096};
            answer(fuse, in->unique, 0, &out, sizeof out);
            break;
        }
        case FUSE_LOOKUP: {
            struct fuse_entry_out out = {.nodeid = 2, .entry_valid = 1000, .attr_valid = 1000, .attr = attributes(2)};
            answer(fuse, in->unique, strcmp(buffer + sizeof *in, "mute") ? -ENOENT : 0, &out, sizeof out);
            break;
        }
        case FUSE_GETATTR: {
            struct fuse_attr_out out = {.attr_valid = 1000, .attr = attributes(in->nodeid)};
            answer(fuse, in->unique, 0, &out, sizeof out);
            break;
        }
        case FUSE_OPEN: {
            struct fuse_open_out out = {.fh = 1};
            answer(fuse, in->unique, 0, &out, sizeof out);
            break;
        }
        case FUSE_READ:
        case FUSE_FORGET:
        case FUSE_INTERRUPT:
            break;
        default:
            answer(fuse, in->unique, -ENOSYS, NULL, 0);
        }
    }
}

static char *mute;

static void *hold_for_reading(void *unused)
{
    int memory = open("/proc/self/mem", O_RDONLY);
    char byte;
    if (memory < 0 || pread(memory, &byte, 1, (off_t)(uintptr_t)mute) < 0)
        perror("/proc/self/mem");
    return unused;
}

static void *wait_to_write(void *unused)
{
    usleep(100000);
    mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return unused;
}

static void *execute(void *path)
{
    execl(path, path, NULL);
    perror(path);
    return NULL;
}

static void grow(const char *directory, int number, size_t mib)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/mute", directory);
    pthread_t thread;
    pthread_create(&thread, NULL, execute, path);
    usleep(200000);
    printf("%d holds\n", number);
    fflush(stdout);
    for (;;) {
        char *data = mmap(NULL, mib << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (data == MAP_FAILED)
            die("mmap");
        for (size_t i = 0; i < mib << 20; i += 4096)
            data[i] = 1;
        munmap(data, mib << 20);
    }
}

static void map_mute(const char *directory)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/mute", directory);
    int file = open(path, O_RDONLY);
    if (file < 0)
        die(path);
    mute = mmap(NULL, 1 << 20, PROT_READ, MAP_SHARED, file, 0);
    if (mute == MAP_FAILED)
        die("mmap");
}

static void hold(const char *directory, int number, size_t mib)
{
    map_mute(directory);
    char *data = mmap(NULL, mib << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED)
        die("mmap");
    mute += 4096 * (number % 256);
    for (size_t i = 0; i < mib << 20; i += 4096)
        *(size_t *)(data + i) = i + 1;
    printf("%d holds\n", number);
    fflush(stdout);
    pthread_t threads[2];
    pthread_create(&threads[0], NULL, hold_for_reading, NULL);
    pthread_create(&threads[1], NULL, wait_to_write, NULL);
    usleep(200000);
    /* What is read is away, most of it. */
    for (size_t sum = 0;;)
        for (size_t i = 0; i < mib << 20; i += 4096)
            sum += *(volatile size_t *)(data + i);
}

static int run(void *(*work)(void *))
{
    work(NULL);
    pause();
    return 0;
}

static int read_it(void *unused)
{
    (void)unused;
    return run(hold_for_reading);
}

static int write_it(void *unused)
{
    (void)unused;
    return run(wait_to_write);
}

/* Two processes that have this memory, too, hold its lock. They are no threads of this one, so that to execute does not end them. */
static void switch_memory(const char *directory)
{
    static char stacks[2][1 << 16] __attribute__((aligned(16)));
    char said[64];
    map_mute(directory);
    if (clone(read_it, stacks[0] + sizeof stacks[0], CLONE_VM | SIGCHLD, NULL) < 0 ||
        clone(write_it, stacks[1] + sizeof stacks[1], CLONE_VM | SIGCHLD, NULL) < 0)
        die("clone");
    usleep(300000);
    /* Memory cannot be had any more. */
    int len = snprintf(said, sizeof said, "%d switches\n", getpid());
    if (write(1, said, len) != len)
        die("write");
    execl("/bin/sleep", "sleep", "100", NULL);
    die("execl");
}

int main(int argc, char **argv)
{
    if (argc == 3 && !strcmp(argv[1], "serve"))
        return serve(argv[2]);
    if (argc == 3 && !strcmp(argv[1], "switch"))
        switch_memory(argv[2]);
    if (argc != 5 || (strcmp(argv[1], "hold") && strcmp(argv[1], "exec")))
        return 2;
    for (int number = 0; number < atoi(argv[3]); number++)
        if (fork() == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            (argv[1][0] == 'h' ? hold : grow)(argv[2], number, strtoul(argv[4], NULL, 0));
        }
    while (wait(NULL) > 0)
        ;
    return 0;
}
