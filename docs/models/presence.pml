/* Presences: does a device find the aggregator's present life, to open a session with?
 *
 * Each life of the aggregator signs one presence, which says when it started, by a calendar that jumps
 * at will. The network has all of them and shows any at any time. Before an attempt is a chance, it
 * shows the present one at least once since the last attempt; and others before and after it.
 *
 * OLD_RULE       the device asks the life that started last
 * BY_CALENDAR    it asks that one, and after an attempt without an answer the one that was shown last
 * neither        so too, but each life starts later than the last one did, as its database knows
 */
#include "common.pml"

#define FINDS_THE_LIFE 1    /* of PATIENCE chances in a row at least one asks the present life */

#ifndef LIVES
#define LIVES 3
#endif
#define PATIENCE 4

byte life = 1;              /* the present one */
byte started[LIVES + 1];
byte newest, shown;         /* presences that the device keeps; 0 for none */
bool turn, chance;
byte missed;

#if defined(OLD_RULE)
#define ASKED newest
#else
#define ASKED (turn -> shown : newest)
#endif
#if defined(OLD_RULE) || defined(BY_CALENDAR)
#define IS_NEWER(a, b) (started[a] > started[b])
#else
#define IS_NEWER(a, b) ((a) > (b))
#endif

inline start() {
    if :: started[life] = 1 :: started[life] = 2 :: started[life] = 3 fi;
    printf("aggregator: life %d starts, on day %d of its calendar\n", life, started[life])
}

inline comes(p) {
    printf("network: shows the presence of life %d\n", p);
    shown = p;
    if
    :: newest == 0 || IS_NEWER(p, newest) -> newest = p
    :: else
    fi;
    if
    :: p == life -> chance = true
    :: else
    fi
}

active proctype world() {
    byte p;
    atomic { start() };
    do
    :: life < LIVES -> atomic { life++; start(); chance = false; missed = 0 }
    :: atomic { select (p : 1 .. life); comes(p); p = 0 }
    :: newest != 0 -> d_step {
        printf("device: asks life %d\n", ASKED);
        if
        :: ASKED == life -> missed = 0; turn = false
        :: ASKED != life && chance -> missed++; turn = !turn
        :: ASKED != life && !chance -> turn = !turn
        fi;
        CLAIM(FINDS_THE_LIFE, missed < PATIENCE);
        chance = false
        }
    od
}
