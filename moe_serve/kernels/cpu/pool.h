/* A pool of threads that claim the pieces of a job. A worker that comes late delays nobody: whoever is there claims
   pieces, and the caller waits only for pieces that were claimed. Workers start with the first job, spin for a while
   after each, then sleep. A second thread that calls while a job runs, and a piece that calls, compute alone. A forked
   child starts without workers. Where ranks share cores, cores.h says where a worker may compute. */
#pragma once
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>
#include "cores.h"
#include "vec.h"

typedef void (*Piece)(const void *job, i64 piece);
enum { SPIN_NS = 200000, YIELD_NS = 20000000, WORKER_STACK = 4 << 20 };

static struct {
    _Alignas(64) _Atomic uint64_t claims; /* number of pieces << 32 | the next one */
    _Alignas(64) _Atomic uint64_t done;
    _Alignas(64) _Atomic uint32_t sleepers, busy;
    Piece work; /* these two change only while no piece is claimed */
    const void *job;
    i64 started;         /* workers */
    _Atomic i64 threads; /* wanted, the caller's included */
    pthread_mutex_t lock;
    pthread_cond_t wake;
} pool = {.threads = 1, .lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

INLINE void pool_pause(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

INLINE i64 pool_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

INLINE int pool_has_pieces(void)
{
    uint64_t at = atomic_load(&pool.claims);
    return (uint32_t)at < at >> 32;
}

static void pool_wake(void)
{
    if (!atomic_load(&pool.sleepers) || !cores_are_free()) return;
    pthread_mutex_lock(&pool.lock);
    atomic_store(&pool.sleepers, 0);
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
}

static void pool_help(i64 index)
{
    uint64_t at = atomic_load(&pool.claims);
    while ((uint32_t)at < at >> 32 && (!index || core_here_is_free())) {
        if (!atomic_compare_exchange_weak(&pool.claims, &at, at + 1)) continue;
        pool.work(pool.job, (uint32_t)at);
        atomic_fetch_add(&pool.done, 1);
        if (!index) pool_wake(); /* a core may have become free since the job began */
        at = atomic_load(&pool.claims);
    }
}

INLINE int pool_wants(i64 index) { return pool_has_pieces() && index < atomic_load(&pool.threads); }

/* A worker that shares its core gives it to whoever can use it, since a thread that sleeps is woken late. */
static void pool_wait_for_pieces(i64 index)
{
    int shared = cores_are_shared();
    i64 end = pool_now_ns() + (shared ? YIELD_NS : SPIN_NS);
    do
        for (int spin = 0; spin < 64; spin++) {
            if (pool_wants(index) && core_here_is_free()) return;
            if (!shared) pool_pause();
            else cores_leave_caller(), sched_yield();
        }
    while (pool_now_ns() < end);
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        atomic_fetch_add(&pool.sleepers, 1); /* until somebody wakes all */
        if (pool_wants(index) && cores_are_free()) break;
        pthread_cond_wait(&pool.wake, &pool.lock);
    }
    pthread_mutex_unlock(&pool.lock);
}

static void *pool_worker(void *index)
{
    for (;;) {
        pool_wait_for_pieces((i64)index);
        pool_help((i64)index);
    }
    return 0;
}

static void pool_reset_in_child(void)
{
    pool.started = 0;
    atomic_store(&cores.ranks, 0);
    atomic_store(&pool.claims, 0);
    atomic_store(&pool.sleepers, 0);
    atomic_store(&pool.busy, 0);
    pool.lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    pool.wake = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
}

__attribute__((constructor)) static void pool_watch_forks(void) { pthread_atfork(0, 0, pool_reset_in_child); }

/* Workers take no signals, which are the interpreter's. Where a thread cannot be started, there are fewer. */
static void pool_start_workers(i64 wanted)
{
    sigset_t all, before;
    pthread_attr_t attributes;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, WORKER_STACK);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_t thread;
    while (pool.started < wanted && !pthread_create(&thread, &attributes, pool_worker, (void *)(pool.started + 1)))
        pool.started++;
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, 0);
}

INLINE i64 pool_threads(void) { return atomic_load_explicit(&pool.threads, memory_order_relaxed); }

/* Calls work(job, piece) for every piece below `pieces`, and returns when all are done. */
static void pool_run(Piece work, const void *job, i64 pieces)
{
    if (pieces < 2 || pool_threads() < 2 || atomic_exchange(&pool.busy, 1)) {
        for (i64 piece = 0; piece < pieces; piece++) work(job, piece);
        return;
    }
    pool.work = work, pool.job = job;
    atomic_store(&pool.done, 0);
    atomic_store(&pool.claims, (uint64_t)pieces << 32);
    if (pool.started < pool_threads() - 1) pool_start_workers(pool_threads() - 1);
    pool_wake();
    pool_help(0);
    for (i64 spin = 0; atomic_load(&pool.done) < (uint64_t)pieces; spin++)
        if (spin < 2000) pool_pause();
        else sched_yield();
    atomic_store(&pool.busy, 0);
}
