/* The library: all kernels, with one pool. */
#include "gemm.c"
#include "experts.c"
#include "group_pack.c"
#include "group_quantise.c"
#include "part_clock.c"
#include "calls.c"
#include "moves.c"
#include "attention.c"
#include "rows.c"
#include "updates.c"
#include "layer_norm.c"
#include "delta.c"
#include "causal_conv.c"
#include "state_space.c"
#include "selective_space.c"
#include "indexed.c"
#include "compressed.c"
#include "streams.c"
#include "gate.c"
#include "capacity.c"
#include "sampling.c"
#include "logprobs.c"

/* Threads of this process's pool from now on, the caller's included. */
i64 set_threads(i64 threads)
{
    atomic_store(&pool.threads, threads);
    return 0;
}

/* From now on products with bfloat16 go by tiles, if it is wanted and this build and this system can. Returns whether. */
i64 use_tiles(i64 wanted)
{
    atomic_store(&tiles_on, HAS_TILES && wanted && tiles_allowed());
    return tiles_on;
}

i64 uses_tiles(void) { return tiles_on; }

/* This process, of this rank, shares num_cores cores with others. words [ranks]: addresses as in cores.h, which hold as
   long as the process; none: it shares no more. */
i64 share_cores(i64 rank, i64 ranks, const i64 *words, i64 num_cores)
{
    atomic_store(&cores.ranks, 0);
    if (ranks > MOST_SHARING) return -1;
    for (i64 r = 0; r < ranks; r++) cores.core_of[r] = (_Atomic uint32_t *)words[r];
    cores.rank = rank, cores.num_cores = num_cores;
    atomic_store(&cores.ranks, ranks);
    return 0;
}

i64 vector_form(void) { return FORM; }
