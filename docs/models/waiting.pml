/* Whom a round waits for: can one device hold rounds up, and is one that is slow left out?
 *
 * Quick devices come to every round, which ends early where it waits for nobody else. A slow honest
 * device sleeps and wakes, and what it does may be lost; one liar sends updates in time or too late,
 * says that it has none, or says nothing.
 *
 * Old rule: a round waits for everybody, until its deadline. New rule: for those whose updates came
 * of late; for others that live in every 2nd, 4th, 8th ... round.
 */
#include "common.pml"

#define BOUNDED  1  /* a liar holds about log2 of the rounds between two updates of its */
#define LIVES_ON 2  /* a slow device that is awake is counted, in a few rounds */

#ifndef ROUNDS
#define ROUNDS 40
#endif
#define PATIENCE 2
#define RAREST 32

typedef Habit { byte missed; bool lives };

Habit slow, liar;
byte number;                                     /* of the round */
bool awake;                                      /* the slow device */
byte left_out;                                   /* rounds in a row that it was awake for */
byte held, since;                                /* by the liar, and rounds, since its last update */

#define WAITED_FOR(who) (OLD || who.missed < PATIENCE || (who.lives && number % who.missed == 0))

#ifdef PERCENTILE               /* What if rounds ended when nine of ten devices had come? */
#define WAITS_FOR_SLOW false
#else
#define WAITS_FOR_SLOW WAITED_FOR(slow)
#endif

inline in_vain(who, says_so) {
    who.missed = MIN(RAREST, who.missed + MAX(1, who.missed));
    who.lives = says_so
}

inline update_of(who) { who.missed = 0; who.lives = true }

active proctype rounds() {
    bool waited;
    byte missed;
    slow.lives = true; liar.lives = true;
    do
    :: number < ROUNDS -> atomic {
        number++;

        waited = WAITS_FOR_SLOW;
        missed = slow.missed;
        if
        :: awake && waited -> update_of(slow); left_out = 0
        :: awake && waited ->
            printf("round %d: what the slow device sent is lost\n", number);
            in_vain(slow, false); left_out = 0
        :: awake && !waited ->
            printf("round %d: the slow device's update is late\n", number);
            update_of(slow); left_out++
        :: awake && !waited ->
            printf("round %d: the slow device was overtaken, and says so\n", number);
            slow.lives = true; left_out++
        :: !awake && waited -> in_vain(slow, false)
        :: !awake && !waited
        fi;
        CLAIM(LIVES_ON, left_out <= MAX(PATIENCE, missed));

        waited = WAITED_FOR(liar);
        since++;
        if
        :: update_of(liar); held = 0; since = 0
        :: waited ->
            printf("round %d: the liar says nothing\n", number);
            in_vain(liar, false); held++
        :: waited ->
            printf("round %d: the liar says that it has no update\n", number);
            in_vain(liar, true); held++
        :: !waited -> liar.lives = true
        :: !waited
        fi;
        CLAIM(BOUNDED, since == 0 || (1 << held) <= 8 * since)
        }
    :: atomic { awake = !awake; left_out = 0; printf("the slow device sleeps, or wakes\n") }
    :: number == ROUNDS -> break
    od
}
