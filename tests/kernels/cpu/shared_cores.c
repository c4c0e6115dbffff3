/* Which threads run pieces while words say where ranks compute, for test_shared_cores.py. */
#include "../../../moe_serve/kernels/cpu/pool.h"

enum { PIECES = 64 };
static _Atomic uint32_t words[MOST_SHARING];
static _Atomic i64 by_workers;
static pthread_t caller;

static void piece(const void *job, i64 index)
{
    (void)job, (void)index;
    i64 end = pool_now_ns() + 20000;
    if (!pthread_equal(pthread_self(), caller)) atomic_fetch_add(&by_workers, 1);
    while (pool_now_ns() < end) pool_pause();
}

/* Shares cores among so many ranks, each on the core of its number: all waiting, or computing. Runs jobs until a worker
   has run a piece, or until deadline_ns are over. Returns how many they have run. */
i64 run_jobs(i64 ranks, i64 waits, i64 deadline_ns)
{
    i64 end = pool_now_ns() + deadline_ns;
    caller = pthread_self();
    for (i64 r = 0; r < ranks; r++) {
        cores.core_of[r] = &words[r];
        atomic_store(&words[r], (uint32_t)(r + 1) | (waits && r ? WAITS : 0));
    }
    cores.rank = 0, cores.num_cores = ranks;
    atomic_store(&cores.ranks, ranks);
    atomic_store(&pool.threads, 2);
    atomic_store(&by_workers, 0);
    while (!atomic_load(&by_workers) && pool_now_ns() < end) pool_run(piece, 0, PIECES);
    return atomic_load(&by_workers);
}
