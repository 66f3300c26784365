// A heap of many blocks that is written, read and copied at random, to be built with -fsanitize=address or thread:
// each block holds what its number and generation say. Prints "every block as expected".
//
// usage: sanitized MIB ROUNDS
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BLOCK = 4000, THREADS = 2 };

struct part {
    unsigned char **blocks;
    unsigned *generation;
    size_t count;
    uint64_t random;
    int rounds;
};

static uint64_t next(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static unsigned char byte_of(size_t block, unsigned generation, size_t at) {
    return (unsigned char)(block * 31 + generation * 17 + at * (block % 7 + 1) / 8);
}

static void fill(struct part *part, size_t block) {
    for (size_t at = 0; at < BLOCK; at++)
        part->blocks[block][at] = byte_of(block, part->generation[block], at);
}

static void expect(struct part *part, size_t block) {
    for (size_t at = 0; at < BLOCK; at++)
        if (part->blocks[block][at] != byte_of(block, part->generation[block], at)) {
            fprintf(stderr, "MISMATCH block %zu at %zu\n", block, at);
            _exit(1);
        }
}

static void *work(void *argument) {
    struct part *part = argument;
    for (size_t block = 0; block < part->count; block++) {
        part->blocks[block] = malloc(BLOCK);
        fill(part, block);
    }
    for (int round = 0; round < part->rounds; round++)
        for (size_t i = 0; i < part->count / 2; i++) {
            size_t block = next(&part->random) % part->count;
            expect(part, block);
            // A fresh block in its place, copied by memcpy, then changed.
            unsigned char *fresh = malloc(BLOCK);
            memcpy(fresh, part->blocks[block], BLOCK);
            free(part->blocks[block]);
            part->blocks[block] = fresh;
            expect(part, block);
            part->generation[block]++;
            fill(part, block);
        }
    for (size_t block = 0; block < part->count; block++) {
        expect(part, block);
        free(part->blocks[block]);
    }
    return NULL;
}

int main(int argc, char **argv) {
    if (argc != 3)
        return 2;
    size_t count = ((size_t)atoi(argv[1]) << 20) / BLOCK / THREADS;
    pthread_t threads[THREADS];
    struct part parts[THREADS];
    for (int i = 0; i < THREADS; i++) {
        parts[i] = (struct part){calloc(count, sizeof(void *)), calloc(count, sizeof(unsigned)), count,
                                 88172645463325252u + (uint64_t)i, atoi(argv[2])};
        pthread_create(&threads[i], NULL, work, &parts[i]);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
        free(parts[i].blocks);
        free(parts[i].generation);
    }
    puts("every block as expected");
    return 0;
}
