/* Clocks: does a wrong one, of either end, keep a device from being counted once it is right again?
 *
 * One device and one aggregator, which signs times: in a session's reply, in a round's manifest, and,
 * as the time of its issue, in a descriptor. It keeps time by its monotonic clock. Its calendar is set
 * at will, a few times; it is followed when it has held (settle), or at once at a restart. The device
 * has no calendar: an estimate, from the last reply, runs on with its own crystal, which is wrong at
 * will; and the ratchet, the largest time that was signed, is on its disk. A thief has the keys of
 * every descriptor but the present one, and tells whoever holds one of these what time he likes.
 *
 * Only differences matter, so all times are relative to the one that the aggregator signs: a step of
 * that one moves everything else. A tick is longer than a round.
 *
 * Old rules, each alone:
 * RUNS_ON    the estimate never falls, and is the ratchet, too: kept over restarts
 * ABSOLUTE   a deadline is held against the estimate as it is: what seems over is over, nothing
 *            corrects it, and no time is asked for again
 * ACROSS     the ratchet goes on under the next descriptor, which it may find expired
 * NO_SERIALS (what if) an older descriptor were taken where it has not expired, as far as the device
 *            can tell
 */
#include "common.pml"

#define AT_ONCE  1     /* once calendars stand, a device is counted in each round that reaches it */
#define KEYS_END 2     /* no keys serve whoever has a newer descriptor, nor by a time at or past their end */

#ifndef STEPS
#define STEPS 2        /* of the calendar */
#endif
#ifndef MOST
#define MOST 3         /* ticks by which one goes, either way */
#endif
#define LENGTH 1       /* of a round, in ticks: an estimate that far ahead finds it over */
#define LIFE 3         /* of a descriptor */
#define END 5          /* of the delegation, when all begins */
#define FAR (STEPS * MOST + LIFE)

#ifdef RUNS_ON
#define ESTIMATE_FALLS false
#else
#define ESTIMATE_FALLS true
#endif
#ifdef ABSOLUTE
#define ASKS_AGAIN false
#else
#define ASKS_AGAIN ESTIMATE_FALLS
#endif
#if defined(ACROSS) || defined(RUNS_ON)
#define BEGINS_ANEW false
#else
#define BEGINS_ANEW true
#endif

/* All relative to the time that is signed. */
short calendar, issued, expires = LIFE, end = END;
bool has_present = true;           /* the device has the aggregator's present descriptor */
short held_expires = LIFE;         /* of the one that it has */
short ratchet;
bool knows; short estimate;        /* from a reply of this start */
bool had_older;                    /* there was one before that */
byte steps;
bool calm;                         /* calendars stand, and the thief is gone */

mtype = { OTHER, COUNTED, MISSED };
mtype last = OTHER;

#define CLIP(value) ((value) > FAR -> FAR : ((value) < 0 - FAR -> 0 - FAR : (value)))
#define LATEST (knows -> MAX(ratchet, estimate) : ratchet)

/* The signed time goes on by this much: a tick, or a calendar that is followed. */
inline forward(by) {
    issued = CLIP(issued - (by)); expires = CLIP(expires - (by));
    held_expires = CLIP(held_expires - (by));
    ratchet = CLIP(ratchet - (by))
}

inline follow() {
    forward(calendar);
    estimate = CLIP(estimate - calendar); end = end - calendar;
    calendar = 0
}

inline renew() {
    issued = 0; expires = MIN(LIFE, end); has_present = false;
    printf("aggregator: renews its descriptor, for %d\n", expires)
}

/* Whoever answers says that it is so late, under the descriptor that the device has. */
inline hear(time) {
    if
    :: MAX(time, ratchet) < held_expires ->
        knows = true;
        if
        :: ESTIMATE_FALLS -> estimate = time
        :: else -> estimate = MAX(MAX(estimate, ratchet), time)
        fi;
        ratchet = MAX(ratchet, time);
        CLAIM(KEYS_END, time < held_expires)
    :: else
    fi
}

inline take_descriptor() {
    if
    :: !has_present && (BEGINS_ANEW || expires > LATEST) ->
        printf("device: takes the present descriptor, issued at %d, until %d\n", issued, expires);
        has_present = true; held_expires = expires; had_older = true;
        if
        :: BEGINS_ANEW -> ratchet = issued
        :: else -> ratchet = MAX(ratchet, issued)
        fi
    :: else
    fi
}

#define SEEMS_OVER (!knows || estimate >= LENGTH || LATEST >= held_expires)

/* A round opens, and the network does its part: descriptor, manifest, and an open and its reply where
 * the device asks for one. */
inline round() {
    take_descriptor();
    if
    :: has_present && !knows -> hear(0)
    :: else
    fi;
    if                                           /* a live manifest: it is no later and no earlier */
    :: ASKS_AGAIN && knows && estimate < 0 -> estimate = 0
    :: else
    fi;
    if
    :: has_present && SEEMS_OVER && ASKS_AGAIN ->
        printf("device: the round seems over (%d); it asks for the time\n", estimate);
        hear(0)
    :: else
    fi;
    if
    :: has_present && !SEEMS_OVER -> last = COUNTED; printf("device: is counted\n")
    :: else -> last = MISSED; printf("device: refuses the round; ahead by %d\n", estimate)
    fi;
    CLAIM(AT_ONCE, !calm || last == COUNTED)
}

active proctype world() {
    short by;
    do
    :: atomic { round() }
    :: expires > 1 -> d_step {                   /* all clocks go on; it renews in time */
        forward(1); last = OTHER
        }
    :: knows -> atomic {                         /* the device's crystal is too fast, too slow */
        if :: estimate = CLIP(estimate + 1) :: estimate = CLIP(estimate - 1) fi;
        last = OTHER
        }
    :: end > 0 -> d_step { renew(); last = OTHER }
    :: calendar != 0 && calendar < end -> atomic {   /* it has held, or serve starts again */
        printf("aggregator: its clock goes by %d\n", calendar);
        follow(); last = OTHER;
        if :: expires <= 1 || issued > 1 -> renew() :: else fi
        }
    :: d_step { knows = false; last = OTHER; printf("device: dies and starts again\n");
#ifdef RUNS_ON
        ratchet = MAX(ratchet, estimate)
#endif
        }
    :: steps < STEPS && !calm -> atomic {
        select (by : -MOST .. MOST);
        steps++; calendar = by; last = OTHER; by = 0;
        printf("operator: sets the calendar %d off what is signed\n", calendar)
        }
    :: !calm && !has_present -> atomic {         /* the thief, by the keys of the one that it has */
        select (by : -MOST .. LIFE);
        last = OTHER;
        printf("thief: says that it is %d, under keys that end at %d\n", by, held_expires);
        hear(by);
        by = 0
        }
    :: !calm && had_older -> d_step {            /* and shows one from before it */
        last = OTHER;
#ifdef NO_SERIALS
        printf("device: takes an older descriptor from the thief\n");
        CLAIM(KEYS_END, false);
#endif
        }
    :: !calm -> d_step { calm = true; last = OTHER; printf("all clocks are left alone\n") }
    od
}

#ifdef LTL
ltl LIVES { (<> calm && []<> (last != OTHER)) -> []<> (last == COUNTED) }
#endif
