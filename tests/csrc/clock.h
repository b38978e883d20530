/*
 * clock.h - csrc's clocks in the hand of a test. Tests set the two variables while no call of the engine runs; clocks
 * start as the system's.
 */
#ifndef AGSF_TEST_CLOCK_H
#define AGSF_TEST_CLOCK_H

#include <stdatomic.h>
#include <time.h>

static _Atomic int64_t step_ms = -1; /* CLOCK_MONOTONIC advances by this at each reading; below 0: by time */
static _Atomic int realtime_ahead_s; /* this much of a helper's idle time is over when it begins */

int __real_clock_gettime(clockid_t clock, struct timespec *now_ret);
int __wrap_clock_gettime(clockid_t clock, struct timespec *now_ret);

int __wrap_clock_gettime(clockid_t clock, struct timespec *now_ret) {
    static _Atomic int64_t now_ms;
    const int failure = __real_clock_gettime(clock, now_ret);

    if (clock == CLOCK_REALTIME) now_ret->tv_sec -= realtime_ahead_s;
    if (clock == CLOCK_MONOTONIC && step_ms >= 0) {
        const int64_t ms = atomic_fetch_add(&now_ms, step_ms);
        *now_ret = (struct timespec){(time_t)(ms / 1000), (long)(ms % 1000 * 1000000)};
    }
    return failure;
}

#endif
