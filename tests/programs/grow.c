/* grow [MIB [MIB_PER_SECOND [random]]]: allocates blocks of every size at a steady pace (0: as fast as it can) and
 * verifies older ones meanwhile; all of them at the end. `random`: nothing in them compresses. */
#define _GNU_SOURCE
#include "check.h"

struct block {
	uint64_t *words;
	size_t count;
};

static int incompressible;

static uint64_t block_word(size_t index, size_t i)
{
	return incompressible ? mix(index * MIB + i) : page_word(1 + index, i % WORDS);
}

static void expect_block(const struct block *blocks, size_t index)
{
	for (size_t i = 0; i < blocks[index].count; i++)
		if (blocks[index].words[i] != block_word(index, i)) {
			fprintf(stderr, "MISMATCH block %zu word %zu at %p: expected %016llx actual %016llx\n", index, i,
				(void *)&blocks[index].words[i], (unsigned long long)block_word(index, i),
				(unsigned long long)blocks[index].words[i]);
			_exit(1);
		}
}

int main(int argc, char **argv)
{
	size_t goal = argument(argc, argv, 1, 256) * MIB, size = 0, count = 0;
	double pace = argument(argc, argv, 2, 100) * (MIB / 1e6);
	struct block *blocks = calloc(goal / 1024 + 1, sizeof *blocks);
	uint64_t start = microseconds();

	incompressible = argc > 3;
	while (size < goal) {
		struct block *block = &blocks[count];
		uint64_t random = mix(count);

		block->count = (1024UL << (random % 11)) / 8;
		block->words = malloc(block->count * 8);
		if (!block->words)
			die("malloc");
		for (size_t i = 0; i < block->count; i++)
			block->words[i] = block_word(count, i);
		size += block->count * 8;
		expect_block(blocks, mix(random) % ++count);
		if (pace > 0)
			while (microseconds() - start < size / pace)
				usleep(500);
	}
	for (size_t i = 0; i < count; i++)
		expect_block(blocks, i);
	printf("grow: %zu blocks, %zu bytes\n", count, size);
	return 0;
}
