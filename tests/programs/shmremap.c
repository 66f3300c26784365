/* shmremap MIB SECONDS: puts a shared memory segment over private memory (SHM_REMAP), detaches it and maps private memory there
 * again, some of it by growing a neighbour. The kernel announces none of this to a userfaultfd. Other threads keep reclaim busy. */
#define _GNU_SOURCE
#include "check.h"
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/shm.h>
#include <sys/syscall.h>

#define PAGES 512
#define LEN (PAGES * PAGE)

static atomic_int stop;
static char *ballast;
static size_t ballast_pages;

/* Keeps more memory in use than the limit permits, so that everything else is moved out soon. */
static void *press(void *unused)
{
	for (size_t i = 0; !stop; i = (i + 1) % ballast_pages)
		if (page_check(ballast + i * PAGE, i) >= 0) {
			page_report(ballast + i * PAGE, i, "ballast");
			_exit(1);
		}
	return unused;
}

static void replace_by_shared(char *at, int by_syscall)
{
	int id = shmget(IPC_PRIVATE, LEN, IPC_CREAT | 0600);
	if (id < 0 || (by_syscall ? (void *)syscall(SYS_shmat, id, at, SHM_REMAP) : shmat(id, at, SHM_REMAP)) != at)
		die("shmat");
	if (shmctl(id, IPC_RMID, NULL))
		die("shmctl");
	pages_fill(at, 8, 99);
	pages_expect(at, 8, 99, "shared");
	if (shmdt(at))
		die("shmdt");
}

int main(int argc, char **argv)
{
	ballast_pages = argument(argc, argv, 1, 64) * 256;
	uint64_t end = microseconds() + argument(argc, argv, 2, 5) * 1000000;
	unsigned random = 20260312;
	char *room = mmap(NULL, 4 * LEN, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	ballast = mmap(NULL, ballast_pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (room == MAP_FAILED || ballast == MAP_FAILED)
		die("mmap");
	pages_fill(ballast, ballast_pages, 0);
	pthread_t thread;
	if (pthread_create(&thread, NULL, press, NULL))
		die("pthread_create");
	unsigned long rounds = 0;
	for (uint64_t base = 1; microseconds() < end; base += PAGES, rounds++) {
		char *at = map_at(room, LEN);
		pages_fill(at, PAGES, base);
		usleep(rand_r(&random) % 60000);
		if (rounds % 4 == 3)
			madvise(at, LEN, MADV_PAGEOUT);
		replace_by_shared(at, rounds % 2);
		map_at(at, LEN);
		usleep(rand_r(&random) % 60000);
		for (size_t i = 0; i < PAGES; i += 3)
			if (*(volatile uint64_t *)(at + i * PAGE)) {
				printf("round %lu: old contents in fresh memory\n", rounds);
				return 1;
			}
		pages_fill(at, PAGES, base);
		usleep(rand_r(&random) % 200000);
		pages_expect(at, PAGES, base, "after the replacement");
		map_at(at, LEN);
	}
	stop = 1;
	pthread_join(thread, NULL);
	printf("nothing was lost\n");
	return 0;
}
