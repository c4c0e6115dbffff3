/* The library: all kernels, with one pool. */
#include "gemm.c"
#include "experts.c"
#include "calls.c"
#include "moves.c"
#include "attention.c"
#include "rows.c"
#include "gate.c"
#include "sampling.c"

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

i64 vector_form(void) { return FORM; }
