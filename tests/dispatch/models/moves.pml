/* Rounds of moving experts while ranks serve (moe_serve/ep/weight_mover.py, expert_carrier_shm.py, engine/step/plan.py,
   engine/balancing/balancing.py, engine/recovery/recovery.py), under all schedules. For SPIN.

   A step: an exchange of what each rank has, the plan that all make of it, its part about experts, a forward of all ranks,
   and then a few pieces of the running round. The lowest rank that takes part announces the rounds. Each moves one expert,
   in two pieces, into the first slot of a rank; the second slots stay as they are. A round may be late once, on its
   destination. Rank LOST may stop anywhere, for good or for a while, as in step_exchange.pml, which has the exchange itself.

   In every forward all ranks have the same placement, and each has the expert in its slot that stands there.

   Mistakes, each of which must be caught: ALONE a rank activates what it has staged itself; IN_PLACE pieces go into the slot
   as they arrive; TRUSTED a rank that rejoins counts as one that has staged what the others serve; SAME_TICKET a destination
   asks for its next expert with the ticket of the last one; KEPT_COUNT a source shows a new ticket before it takes back the number of pieces. */

#define ALL ((1 << R) - 1)
#define IN(r) (members >> (r) & 1)
#define OTHER(r) ((r) != me && IN(r))
#define LEADER (1 - IN(0))
#define STAMP (epoch * 16 + n)
#define LEFT(r) (OTHER(r) && proposed[r] > epoch)
#define VOID (LEFT(0) || LEFT(1) || LEFT(2))
#define MISSES(missing) (epoch == 0 && me != LOST && (missing))
#define IS_LATE (me == LOST && epoch == 0 && VOID) /* the others may go on without it */
#define WAIT(condition, missing) if :: (condition) && !IS_LATE :: IS_LATE || (VOID && !(condition)) -> goto left :: !(condition) && MISSES(missing) -> goto left fi
#define HERE(at, r) (!OTHER(r) || at[r] == STAMP || at[r] == STAMP + 1) /* it may be in the next step */
#define ALL_HERE(at) (HERE(at, 0) && HERE(at, 1) && HERE(at, 2))
#define NONE 255

/* What the ranks show in an exchange; two buffers */
#define OF(r) ((r) * 2 + n % 2)
byte row_staged[2 * R], row_version[2 * R];
bool row_fault[2 * R], row_message[2 * R], row_needs[2 * R], row_sees[2 * R];
byte at_exchange[R], at_forward[R];

byte told_at[R], told_version[R], told[R * R];     /* a broadcast of the placement, by root */
byte heard_at[R], heard_version[R], heard_move[R]; /* a broadcast of a round */

byte table[R * R];          /* [rank that knows it, rank]: the expert in the first slot */
byte version[R];

byte ticket[R], wanted[R];  /* segments: of a destination */
byte shown[R], published[R], sum[R], data[2 * R]; /* of a source */

byte proposed[R];
bool returns, was_late;
byte num_rounds;

#define EXPERT(r, slot) ((slot) -> 2 * (r) + 1 : table[me * R + (r)])
#define MOVE(from, slot, to) ((from) * 8 + (slot) * 4 + (to))
#define ROUND_ID (running * 32 + MOVE(from, from_slot, to))

inline end_round() {
    ticket[me] = 0; running = 0; staged = 0; fault = false; serves = 0; num = 0; from = 0; from_slot = 0; to = 0;
    staging[0] = 0; staging[1] = 0
}

inline make_plan() {
    newest = 0; behind = 0; may = 1; cancels = 0; asks = 0; root = NONE; sees = 1; r = 0;
    do
    :: r < R && IN(r) && !row_needs[OF(r)] && row_version[OF(r)] > newest -> newest = row_version[OF(r)]; r++
    :: r < R && !(IN(r) && !row_needs[OF(r)] && row_version[OF(r)] > newest) -> r++
    :: else -> break
    od;
    r = R;
    do
    :: r > 0 ->
        r--;
        if
        :: IN(r) ->
            cancels = cancels || row_fault[OF(r)]; asks = asks || row_message[OF(r)]; sees = sees && row_sees[OF(r)];
            behind = behind || (!row_needs[OF(r)] && row_version[OF(r)] < newest);
            root = (!row_needs[OF(r)] && row_version[OF(r)] == newest -> r : root)
        :: else
        fi
    :: else -> break
    od;
    assert(is_first || !behind); /* the ranks are not out of step */
    do
    :: r < R && IN(r) && !row_needs[OF(r)] ->
        may = may && (behind -> row_version[OF(r)] == newest || row_staged[OF(r)] == newest : !is_first && row_staged[OF(r)] == newest + 1);
        r++
    :: r < R && !(IN(r) && !row_needs[OF(r)]) -> r++
    :: else -> break
    od;
    activate = (may -> (behind -> newest : newest + 1) : 0);
#ifdef ALONE
    activate = (staged -> staged : 0);
#endif
    lacks = behind && !activate; r = 0;
    do
    :: r < R && IN(r) -> lacks = lacks || row_needs[OF(r)]; r++
    :: r < R && !IN(r) -> r++
    :: else -> break
    od;
    r = 0; newest = 0; behind = false; may = false
}

/* Copies a piece into the send buffer, for whoever waits for it. */
inline put_piece() {
    atomic {
        r = (wanted[to] == ROUND_ID -> ticket[to] : 0);
        if
        :: r != serves -> serves = r; num = 0
        :: else -> goto_put = true
        fi
    }
    if
    :: goto_put
    :: else ->
#ifdef KEPT_COUNT
        shown[me] = r; published[me] = 0;
#else
        shown[me] = 0; published[me] = 0; shown[me] = r;
#endif
        skip
    fi;
    goto_put = false;
    if
    :: r && num < 2 ->
        atomic { data[2 * me + num] = EXPERT(me, from_slot); sum[me] = EXPERT(me, from_slot); num++ }
        published[me] = num
    :: else
    fi;
    r = 0
}

/* Copies a piece out of the send buffer of its source. */
inline take_piece() {
    staging[num] = data[2 * from + num];
    atomic {
        if
        :: shown[from] == ticket[me] ->
#ifdef IN_PLACE
            slot = staging[num];
#endif
            num++;
            if
            :: num == 2 && staging[0] == sum[from] && staging[1] == sum[from] -> staged = running
            :: num == 2 && !(staging[0] == sum[from] && staging[1] == sum[from]) -> fault = true
            :: else
            fi
        :: else
        fi
    }
}

inline choose() {
    if
    :: IN(1) && IN(0) -> heard_move[me] = MOVE(1, 0, 0)
    :: IN(1) && IN(0) -> heard_move[me] = MOVE(1, 1, 0)
    :: IN(2) && IN(1) -> heard_move[me] = MOVE(2, 0, 1)
    :: IN(2) && IN(0) -> heard_move[me] = MOVE(0, 1, 2)
    fi
}

proctype rank(byte me)
{
    byte n, epoch, members = ALL, r, next = me + 1, slot = 2 * me;
    byte running, from, from_slot, to, staged, serves, num, staging[2]; /* of the round; num: pieces put, or taken */
    bool fault, needs, goto_put;
    byte newest, activate, root;
    bool behind, may, cancels, asks, lacks, sees, is_first;
again:
    n = 0;
    do
    :: n < STEPS ->
        atomic {
            n++; is_first = (n == 1 && epoch > 0);
            row_staged[OF(me)] = staged; row_version[OF(me)] = version[me]; row_fault[OF(me)] = fault;
            row_needs[OF(me)] = needs; row_sees[OF(me)] = (epoch == 1 && returns);
            row_message[OF(me)] = (me == LEADER && !running && !is_first && num_rounds < ROUNDS);
            at_exchange[me] = STAMP
        }
        atomic { WAIT(ALL_HERE(at_exchange), !HERE(at_exchange, LOST)); make_plan() }
        if
        :: sees -> goto rejoin
        :: else
        fi;
        atomic {
            if
            :: activate > version[me] && !needs ->
                assert(running == activate);
                table[me * R + to] = EXPERT(from, from_slot);
                slot = (me == to -> (staging[0] == staging[1] -> staging[0] : NONE) : slot);
                version[me] = activate;
                end_round()
            :: else
            fi;
            if
            :: is_first || cancels -> end_round()
            :: else
            fi
        }
        if
        :: lacks && root == me ->
            atomic {
                told_version[me] = version[me];
                do
                :: r < R -> told[me * R + r] = table[me * R + r]; r++
                :: else -> break
                od;
                r = 0; told_at[me] = STAMP
            }
        :: lacks && root != me ->
            atomic {
                WAIT(told_at[root] == STAMP, root == LOST);
                if
                :: needs || version[me] != told_version[root] ->
                    do
                    :: r < R -> table[me * R + r] = told[root * R + r]; r++
                    :: else -> break
                    od;
                    r = 0; version[me] = told_version[root]; needs = false; slot = told[root * R + me]
                :: else
                fi
            }
        :: else
        fi;
        if
        :: asks ->
            atomic {
                if
                :: me == LEADER -> choose(); num_rounds++; heard_version[me] = version[me] + 1; heard_at[me] = STAMP
                :: else -> WAIT(heard_at[LEADER] == STAMP, LEADER == LOST)
                fi;
                running = heard_version[LEADER]; from = heard_move[LEADER] / 8; from_slot = heard_move[LEADER] / 4 % 2;
                to = heard_move[LEADER] % 4;
                staged = (me == to -> 0 : running);
                if
                :: me == to ->
#ifndef SAME_TICKET
                    next = next + R;
#endif
                    wanted[me] = ROUND_ID; ticket[me] = next
                :: else
                fi
            }
        :: else
        fi;
        atomic { at_forward[me] = STAMP; activate = 0; cancels = 0; asks = 0; lacks = 0; sees = 0; root = 0 }
        atomic {
            WAIT(ALL_HERE(at_forward), !HERE(at_forward, LOST));
            if
            :: VOID -> goto left
            :: else
            fi;
            assert(!needs && slot == table[me * R + me]);
            do
            :: r < R && IN(r) ->
                assert(version[r] == version[me]);
                assert(table[r * R] == table[me * R] && table[r * R + 1] == table[me * R + 1] && table[r * R + 2] == table[me * R + 2]);
                r++
            :: r < R && !IN(r) -> r++
            :: else -> break
            od;
            r = 0
        }
        do
        :: running && !fault && me == from && num < 2 -> put_piece()
        :: running && !fault && me == to && !staged && shown[from] == ticket[me] && published[from] > num -> take_piece()
        :: running && !fault && me == to && !staged && !was_late -> atomic { was_late = true; fault = true }
        :: break
        od
    :: else -> break
    od;
end_of_steps:
    VOID;
left:
    atomic {
        n = 0; r = 0; activate = 0; cancels = 0; asks = 0; lacks = 0; sees = 0; root = 0; goto_put = false;
        if
        :: epoch == 2 -> goto end_of_all
        :: epoch < 2 && me == LOST && !needs -> returns = true
        :: epoch < 2 && me != LOST -> proposed[me] = epoch + 1
        fi
    }
    if
    :: me == LOST ->
end_masked:
        atomic {
            (proposed[0] == 2 || proposed[1] == 2 || proposed[2] == 2);
#ifndef TRUSTED
            needs = true
#endif
        };
rejoin:
        atomic { n = 0; sees = 0; activate = 0; cancels = 0; asks = 0; lacks = 0; root = 0; proposed[me] = 2 }
        atomic { proposed[0] == 2 && proposed[1] == 2 && proposed[2] == 2; epoch = 2; members = ALL }
    :: else ->
        atomic {
            (proposed[0] > epoch || LOST == 0) && (proposed[1] > epoch || LOST == 1) && (proposed[2] > epoch || LOST == 2);
            epoch++; members = ALL & ~(1 << LOST)
        }
    fi;
    goto again;
end_of_all:
    skip
}

init
{
    byte i, j;
    atomic {
        do
        :: i < R ->
            j = 0;
            do
            :: j < R -> table[i * R + j] = 2 * j; j++
            :: else -> break
            od;
            run rank(i); i++
        :: else -> break
        od
    }
}
