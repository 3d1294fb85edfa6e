/* Adaptive deadlines: can a few devices that come late move them?
 *
 * A deadline is MARGIN times the 90th percentile of when the devices of the last WINDOW rounds came,
 * within BOUND. In each round all honest devices come, in time or all of them late; liars send late
 * updates for the rounds of the window, as many copies as they like, whenever they like. The
 * aggregator dies at will, and forgets who was late.
 *
 * Old rule: each copy is an arrival. New rule: a device is late once a round, and an arrival counts
 * for no more than BOUND.
 */
#include "common.pml"

#define BOUNDED 1   /* while liars are under a tenth, no longer than honest devices explain */
#define ADAPTS  2   /* a fleet that became slow is waited for */

#ifndef HONEST
#define HONEST 10   /* arrivals of a round */
#endif
#ifndef LIARS
#define LIARS 1     /* fewer than a tenth of all */
#endif
#define WINDOW 2
#define MOST_COPIES 6

#define FAST 2      /* seconds after the opening */
#define SLOW 20
#define LIE 200
#define MARGIN 2
#define BOUND 90    /* the configured deadline */

byte fast[WINDOW], slow[WINDOW], lies[WINDOW];   /* arrivals known, newest round first */
byte still_to_come;                              /* honest devices, late for the newest round */
bool was_late[WINDOW * LIARS];
byte deadline = BOUND;

/* Liars count here as they should: each once a round, however many copies it sent. */
#ifdef ANY_SHARE                /* What if liars were a tenth of those that came, or more? */
#define LIARS_ARE_FEW (n_fast + n_slow > 0)
#else
#define LIARS_ARE_FEW (9 * n_liars < n_fast + n_slow)
#endif

inline quantile() {
    n_fast = 0; n_slow = 0; n_lies = 0; n_liars = 0;
    for (i : 0 .. WINDOW - 1) {
        n_fast = n_fast + fast[i]; n_slow = n_slow + slow[i]; n_lies = n_lies + lies[i]
    }
    for (i : 0 .. WINDOW * LIARS - 1) { n_liars = n_liars + was_late[i] }
    i = 0;
    place = n_fast + n_slow + n_lies;
    if
    :: place == 0 -> deadline = BOUND
    :: place > 0 ->
        place = (9 * (place - 1) + 9) / 10;      /* of the larger neighbour, counted from 0 */
        if
        :: place < n_fast -> deadline = MIN(BOUND, MARGIN * FAST)
        :: place >= n_fast && place < n_fast + n_slow -> deadline = MIN(BOUND, MARGIN * SLOW)
        :: place >= n_fast + n_slow -> deadline = MIN(BOUND, MARGIN * LIE)
        fi;
        printf("aggregator: a round opens; %d arrivals known, %d of liars; deadline %d s\n",
               n_fast + n_slow + n_lies, n_lies, deadline);
        CLAIM(BOUNDED, !LIARS_ARE_FEW || deadline <= MARGIN * (n_slow > 0 -> SLOW : FAST));
        CLAIM(ADAPTS, n_slow < HONEST || deadline >= SLOW)
    fi
}

active proctype world() {
    byte i;
    short n_fast, n_slow, n_lies, n_liars, place;
    do
    :: atomic {                                  /* a round ends, the next one opens */
        quantile();
        for (i : 1 .. WINDOW - 1) {
            fast[WINDOW - i] = fast[WINDOW - i - 1];
            slow[WINDOW - i] = slow[WINDOW - i - 1];
            lies[WINDOW - i] = lies[WINDOW - i - 1]
        }
        for (i : 1 .. (WINDOW - 1) * LIARS) {
            was_late[WINDOW * LIARS - i] = was_late[(WINDOW - 1) * LIARS - i]
        }
        for (i : 0 .. LIARS - 1) { was_late[i] = false }
        i = 0;
        slow[0] = 0; lies[0] = 0;
        if
        :: fast[0] = HONEST; still_to_come = 0
        :: fast[0] = 0; still_to_come = HONEST
        fi;
        n_fast = 0; n_slow = 0; n_lies = 0; n_liars = 0; place = 0
        }
    :: still_to_come > 0 -> d_step {
        printf("devices: all honest ones come late\n");
        slow[0] = still_to_come; still_to_come = 0
        }
    :: atomic {
        select (i : 0 .. WINDOW * LIARS - 1);
        if
        :: OLD && lies[i / LIARS] < MOST_COPIES ->
            printf("liar %d: a late update\n", i % LIARS);
            was_late[i] = true; lies[i / LIARS]++
        :: !OLD && !was_late[i] ->
            printf("liar %d: a late update\n", i % LIARS);
            was_late[i] = true; lies[i / LIARS]++
        :: else
        fi;
        i = 0
        }
    :: d_step {
        printf("aggregator: dies and starts again\n");
        for (i : 0 .. WINDOW - 1) { slow[i] = 0; lies[i] = 0 }
        for (i : 0 .. WINDOW * LIARS - 1) { was_late[i] = false }
        i = 0; still_to_come = 0
        }
    od
}
