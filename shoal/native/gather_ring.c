// Batches of an epoch, gathered into slots by threads that never ask for Python's lock.
//
// 1. A batch is a step: its positions follow from the schedule, its samples from the order, their parts from the
//    starts of the parts. So a thread that knows the number of a step can gather it alone.
// 2. A thread claims the next step that is due, up to `ahead` steps before it is asked for, and a free slot: one that
//    it has filled before, if there is one, because that lies in its own cache.
// 3. Whoever asks for a batch that is not there claims and gathers too, instead of sleeping; it sleeps when nothing is
//    left to claim. Asking gives the slot of the batch before back.
//
// Example: ahead 2, two threads of which one asks. It asks for step 0 and gathers that; the other gathers step 1. It
// asks for step 1, which the other still gathers, claims step 2, and is given 1 and 2 without another wait.

#define _POSIX_C_SOURCE 200809L

#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "gather_step.h"

enum { MOST_SLOTS = 64, MOST_COLUMNS = 256, MOST_KEYS = 16, MOST_GATHERERS = 64, NOT_YET = -1, FAILED = -2 };

typedef struct {
    char *out[MOST_COLUMNS];
    int owner;  // who filled it last
    int is_free;
} Slot;

typedef struct {
    int64_t step;
    int slot, is_right;
} Done;

typedef struct Ring Ring;

typedef struct {
    Ring *ring;
    int number;
    Notes notes;
    pthread_t thread;
} Gatherer;

struct Ring {
    Schedule schedule;
    size_t num_columns;
    Column *columns;
    Slot *slots;
    int num_slots;
    Done done[MOST_SLOTS];  // of step s: at s % MOST_SLOTS, once its `step` says so
    uint64_t keys[2][MOST_KEYS];
    int64_t key_epochs[2];
    Gatherer gatherers[MOST_GATHERERS];  // number 0 is the one who asks
    int num_gatherers;
    int64_t next, asked;  // the step to be claimed next, and the one after the last that was asked for
    int64_t ahead;
    int held, is_asking, does_help, is_stopped, num_idle;
    int64_t waited_ns, load_ns;
    pthread_mutex_t lock;
    pthread_cond_t due, ready;
};

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static int slot_for(const Ring *ring, int number) {
    int found = -1;
    for (int i = 0; i < ring->num_slots; i++) {
        if (!ring->slots[i].is_free) continue;
        if (ring->slots[i].owner == number) return i;
        if (found < 0) found = i;
    }
    return found;
}

static int is_due(const Ring *ring) {
    const int64_t epoch = ring->next / ring->schedule.steps_per_epoch;
    return !ring->is_stopped && ring->next < ring->schedule.last_step && ring->next < ring->asked + ring->ahead &&
           (ring->schedule.a == 0 || ring->key_epochs[epoch % 2] == epoch);
}

// Claims a step and gathers it, if one is due and a slot is free. Called and left with the lock, which is free between.
static int gather_one(Ring *ring, const Gatherer *mine) {
    int at = is_due(ring) ? slot_for(ring, mine->number) : -1;
    if (at < 0) return 0;
    const int64_t step = ring->next++;
    ring->slots[at].is_free = 0;
    ring->slots[at].owner = mine->number;
    pthread_mutex_unlock(&ring->lock);
    const int64_t begin_ns = now_ns();
    const uint64_t *keys = ring->keys[step / ring->schedule.steps_per_epoch % 2];
    const int is_right = gather_step(&ring->schedule, ring->columns, ring->num_columns, step, keys, &mine->notes,
                                     ring->slots[at].out);
    const int64_t took_ns = now_ns() - begin_ns;
    pthread_mutex_lock(&ring->lock);
    ring->load_ns += took_ns;
    ring->done[step % MOST_SLOTS] = (Done){step, at, is_right};
    if (ring->is_asking && step == ring->asked - 1) pthread_cond_signal(&ring->ready);
    return 1;
}

static void *gather_on(void *argument) {
    const Gatherer *mine = argument;
    Ring *ring = mine->ring;
    pthread_mutex_lock(&ring->lock);
    while (!ring->is_stopped) {
        if (gather_one(ring, mine)) continue;
        ring->num_idle++;
        pthread_cond_wait(&ring->due, &ring->lock);
        ring->num_idle--;
    }
    pthread_mutex_unlock(&ring->lock);
    return NULL;
}

static int prepare(Ring *ring, int number) {
    ring->gatherers[number].ring = ring;
    ring->gatherers[number].number = number;
    return open_notes(&ring->gatherers[number].notes, &ring->schedule);
}

static void forget(Ring *ring) {
    for (int i = 0; i < MOST_GATHERERS; i++) close_notes(&ring->gatherers[i].notes);
    free(ring->columns);
    free(ring->slots);
    free(ring);
}

// Returns a ring without slots and threads, or NULL. What the columns and the schedule point to must outlive it.
Ring *shoal_ring_open(const Column *columns, size_t num_columns, const Schedule *schedule) {
    if (num_columns == 0 || num_columns > MOST_COLUMNS || schedule->num_keys > MOST_KEYS) return NULL;
    if (schedule->steps_per_epoch < 1 || schedule->num_parts < 1) return NULL;
    Ring *ring = calloc(1, sizeof(Ring));
    if (ring == NULL) return NULL;
    ring->schedule = *schedule;
    ring->num_columns = num_columns;
    ring->columns = malloc(num_columns * sizeof(Column));
    ring->slots = calloc(MOST_SLOTS, sizeof(Slot));
    if (!ring->columns || !ring->slots || !prepare(ring, 0)) {
        forget(ring);
        return NULL;
    }
    for (size_t c = 0; c < num_columns; c++) ring->columns[c] = columns[c];
    for (int i = 0; i < MOST_SLOTS; i++) ring->done[i].step = -1;
    ring->key_epochs[0] = ring->key_epochs[1] = -1;
    ring->next = ring->asked = schedule->first_step;
    ring->held = -1;
    ring->num_gatherers = 1;
    pthread_mutex_init(&ring->lock, NULL);
    pthread_cond_init(&ring->due, NULL);
    pthread_cond_init(&ring->ready, NULL);
    return ring;
}

// Adds a slot: where the batches of each column go. Returns how many there are now, or -1 if there can be no more.
int shoal_ring_add_slot(Ring *ring, char *const *out) {
    pthread_mutex_lock(&ring->lock);
    int count = -1;
    if (ring->num_slots < MOST_SLOTS) {
        Slot *slot = &ring->slots[ring->num_slots];
        for (size_t c = 0; c < ring->num_columns; c++) slot->out[c] = out[c];
        slot->owner = -1;
        slot->is_free = 1;
        count = ++ring->num_slots;
    }
    pthread_mutex_unlock(&ring->lock);
    return count;
}

// The keys of the order in an epoch: those of two epochs are kept, this one and the next.
void shoal_ring_set_keys(Ring *ring, int64_t epoch, const uint64_t *keys) {
    pthread_mutex_lock(&ring->lock);
    for (size_t k = 0; k < ring->schedule.num_keys; k++) ring->keys[epoch % 2][k] = keys[k];
    ring->key_epochs[epoch % 2] = epoch;
    pthread_cond_broadcast(&ring->due);
    pthread_mutex_unlock(&ring->lock);
}

// Has `threads` gather up to `ahead` steps before they are asked for; the one who asks helps them if `does_help`.
void shoal_ring_set_pace(Ring *ring, int64_t ahead, int threads, int does_help) {
    pthread_mutex_lock(&ring->lock);
    ring->ahead = ahead;
    ring->does_help = does_help;
    while (!ring->is_stopped && ring->num_gatherers <= threads && ring->num_gatherers < MOST_GATHERERS) {
        Gatherer *next = &ring->gatherers[ring->num_gatherers];
        if (!prepare(ring, ring->num_gatherers) || pthread_create(&next->thread, NULL, gather_on, next) != 0) {
            close_notes(&next->notes);
            next->notes = (Notes){0};
            ring->does_help = 1;  // who asks does the work of the thread that could not be had
            break;
        }
        ring->num_gatherers++;
    }
    pthread_cond_broadcast(&ring->due);
    pthread_mutex_unlock(&ring->lock);
}

static int take(Ring *ring) {
    const Done *done = &ring->done[(ring->asked - 1) % MOST_SLOTS];
    if (done->step != ring->asked - 1) return NOT_YET;
    ring->is_asking = 0;
    ring->held = done->slot;
    return done->is_right ? done->slot : FAILED;
}

static int gather_or_wait(Ring *ring, const struct timespec *until) {
    int found;
    while ((found = take(ring)) == NOT_YET) {
        if (ring->does_help && gather_one(ring, &ring->gatherers[0])) continue;
        if (pthread_cond_timedwait(&ring->ready, &ring->lock, until) != 0) return take(ring);
    }
    return found;
}

// Returns the slot of the next step and takes back the one before. NOT_YET: it has not come within `wait_ns`, ask
// again. FAILED: a sample of the step lies outside its part.
int shoal_ring_next(Ring *ring, int64_t wait_ns) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    const int64_t end_ns = until.tv_nsec + wait_ns;
    until.tv_sec += end_ns / 1000000000;
    until.tv_nsec = end_ns % 1000000000;
    const int64_t begin_ns = now_ns();
    pthread_mutex_lock(&ring->lock);
    if (!ring->is_asking) {
        if (ring->held >= 0) ring->slots[ring->held].is_free = 1;
        ring->held = -1;
        ring->asked++;
        ring->is_asking = 1;
    }
    if (ring->num_idle && is_due(ring)) pthread_cond_signal(&ring->due);
    int found = gather_or_wait(ring, &until);
    ring->waited_ns += now_ns() - begin_ns;
    pthread_mutex_unlock(&ring->lock);
    return found;
}

// How long the one who asks has been in shoal_ring_next, and how long all have gathered.
void shoal_ring_times(Ring *ring, int64_t *times_ns) {
    pthread_mutex_lock(&ring->lock);
    times_ns[0] = ring->waited_ns;
    times_ns[1] = ring->load_ns;
    pthread_mutex_unlock(&ring->lock);
}

// Ends the threads, each after the batch it is at. What is asked for after that never comes.
void shoal_ring_stop(Ring *ring) {
    pthread_mutex_lock(&ring->lock);
    const int others = ring->is_stopped ? 1 : ring->num_gatherers;
    ring->is_stopped = 1;
    pthread_cond_broadcast(&ring->due);
    pthread_mutex_unlock(&ring->lock);
    for (int i = 1; i < others; i++) pthread_join(ring->gatherers[i].thread, NULL);
}

// Gives back what the ring took. Nobody may be in a call.
void shoal_ring_free(Ring *ring) {
    shoal_ring_stop(ring);
    pthread_mutex_destroy(&ring->lock);
    pthread_cond_destroy(&ring->due);
    pthread_cond_destroy(&ring->ready);
    forget(ring);
}
