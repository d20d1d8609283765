// Runs one function over [0, count) in several threads: each takes the next `grain` items until none is left.
// The threads live as long as the call: about 20 us each, and nothing is left behind that a fork could break.

#ifndef SHOAL_PARALLEL_H
#define SHOAL_PARALLEL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>

enum { MOST_THREADS = 256 };

// `slot` is a number that no other thread of the call has: 0 to threads - 1.
typedef void (*Work)(void *context, size_t slot, size_t begin, size_t end);

typedef struct {
    Work work;
    void *context;
    size_t count, grain;
    atomic_size_t next, slots;
} Queue;

static inline void *take_from_queue(void *argument) {
    Queue *queue = argument;
    size_t slot = atomic_fetch_add(&queue->slots, 1);
    for (;;) {
        size_t begin = atomic_fetch_add(&queue->next, queue->grain);
        if (begin >= queue->count) return NULL;
        size_t left = queue->count - begin;
        queue->work(queue->context, slot, begin, begin + (left < queue->grain ? left : queue->grain));
    }
}

static inline void run_parallel(Work work, void *context, size_t count, size_t grain, size_t threads) {
    Queue queue = {.work = work, .context = context, .count = count, .grain = grain ? grain : 1};
    atomic_init(&queue.next, 0);
    atomic_init(&queue.slots, 0);
    size_t useful = count / queue.grain + 1, started = 0;
    if (threads > useful) threads = useful;
    if (threads <= 1) {  // in one piece: what is read ahead does not begin anew with every grain
        if (count) work(context, 0, 0, count);
        return;
    }
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    pthread_t others[MOST_THREADS];
    while (started + 1 < threads && pthread_create(&others[started], NULL, take_from_queue, &queue) == 0) started++;
    take_from_queue(&queue);  // a thread that could not be had is one that does not help
    for (size_t i = 0; i < started; i++) pthread_join(others[i], NULL);
}

#endif
