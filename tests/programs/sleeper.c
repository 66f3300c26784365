/* sleeper: a setuid program, whose memory nobody else may read. It ends by itself. */
#include <unistd.h>

int main(void)
{
	sleep(2);
	return 0;
}
