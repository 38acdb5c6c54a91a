/* The system calls of exchange.c, refused on demand: it is compiled with `syscall` and `clock_gettime` renamed. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int fault_clock, fault_futex_wait, fault_pidfd; /* an errno, or 0 to let the call through */
long fault_num_syscalls;
void (*fault_before_pidfd)(void), (*fault_before_clock)(void); /* run just before; may be null */

long fault_syscall(long number, ...)
{
    va_list list;
    long words[6];
    int fault = 0;

    va_start(list, number);
    for (int index = 0; index < 6; index++)
        words[index] = va_arg(list, long);
    va_end(list);
    fault_num_syscalls++;
    if (number == SYS_futex && ((int)words[1] & FUTEX_CMD_MASK) == FUTEX_WAIT_BITSET)
        fault = fault_futex_wait;
    if (number == SYS_pidfd_open) {
        if (fault_before_pidfd != NULL)
            fault_before_pidfd();
        fault = fault_pidfd;
    }
    if (fault != 0) {
        errno = fault;
        return -1;
    }
    return syscall(number, words[0], words[1], words[2], words[3], words[4], words[5]);
}

int fault_clock_gettime(clockid_t clock, struct timespec *now)
{
    if (fault_before_clock != NULL)
        fault_before_clock();
    if (fault_clock != 0) {
        errno = fault_clock;
        return -1;
    }
    return clock_gettime(clock, now);
}
