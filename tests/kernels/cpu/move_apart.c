/* Two ranks on one core, for test_shared_cores.py. */
#include "../../../moe_serve/dispatch/shm/wait.h"

/* The second of two ranks finds the first on its core, and moves. Returns whether it is elsewhere and has its mask. */
i64 moves_apart(void)
{
    unsigned long before[16] = {0}, after[16] = {0};
    uint32_t first = core_here(), second = first;
    uint32_t *words[] = {&first, &second};
    syscall(SYS_sched_getaffinity, 0, sizeof before, before);
    move_apart(&(Waits){.rank = 0, .num_ranks = 2, .core_of = words});
    i64 stayed = core_here() == first; /* the first of them does not move */
    move_apart(&(Waits){.rank = 1, .num_ranks = 2, .core_of = words});
    i64 moved = core_here() != first;
    syscall(SYS_sched_getaffinity, 0, sizeof after, after);
    return stayed && moved && !memcmp(before, after, sizeof before);
}
