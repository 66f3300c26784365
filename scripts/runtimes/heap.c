/* An array is filled and read; to be compiled to memory and run there. */
#include <stdio.h>
#include <stdlib.h>

int main(void)
{
	unsigned count = 20000000, sum = 0, *array = malloc(count * sizeof *array);

	for (int round = 0; round < 3; round++) {
		for (unsigned i = 0; i < count; i++)
			array[i] = round ? array[i] * 3 + i : i * 2654435761u;
		for (unsigned i = 0; i < count; i += 3)
			sum = sum * 31 + array[i];
		printf("%u\n", sum);
	}
	return 0;
}
