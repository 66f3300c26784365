/* signals: sends SIGUSR1 to its process group, and prints the signals that come, with the values of those that were queued, until
 * SIGTERM. */
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

int main(void)
{
	sigset_t all;
	siginfo_t info;

	sigfillset(&all);
	sigprocmask(SIG_BLOCK, &all, NULL);
	kill(0, SIGUSR1);
	puts("ready");
	do {
		fflush(stdout);
		if (sigwaitinfo(&all, &info) < 0)
			return 1;
		printf("%d %d\n", info.si_signo, info.si_code == SI_QUEUE ? info.si_value.sival_int : 0);
	} while (info.si_signo != SIGTERM);
	return 0;
}
