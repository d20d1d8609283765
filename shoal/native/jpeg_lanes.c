// Steps over the codes of several images at once, to know where each block ends.
//
// Each step waits for the one before: which bits come next is known when this one's length is. One image keeps a core
// waiting for its cache most of the time; three of them, step by step in turns, do not. A branch at the end of each
// block would be guessed wrong nearly every time, so there is none:
//
// 1. A step adds its bits and its coefficients to `reached`. Three are made with the bits that are there; if the block
//    ends with the first or the second, those after it do not count.
// 2. Where that is, is written down as the end of the block. If it has ended, the next one is written behind it, and
//    the next step is from the table of the next block; if not, it is written over.
// 3. What a step cannot say (a long code, a block that ends without saying so, with its last coefficient) makes
//    `reached` too large: that code is read by itself.
//
// 450x350 pixels at 45 kB have 3,828 blocks of 10 steps, and 250 codes that are read by themselves.

#include "jpeg_lanes.h"

#include "jpeg_bits.h"

// What a loop of steps changes. `word` are the 64 bits from `place` on.
typedef struct {
    uint64_t place, reached, block, word;
    const uint16_t *table;
} At;

INLINE At load(const Lane *lane) {
    At at = {.place = lane->place, .reached = lane->reached, .block = lane->block, .table = lane->table};
    at.word = bits_at(lane->scan, at.place);
    return at;
}

INLINE void store(Lane *lane, At at) {
    lane->place = at.place, lane->reached = at.reached, lane->block = at.block, lane->table = at.table;
}

// Returns `first` if a block ends there, else `then`. Compilers make a branch of this where they can.
INLINE uint64_t first_end(uint64_t first, uint64_t then) {
#if defined(__x86_64__) && defined(__GNUC__)
    __asm__("cmp %2, %1\n\tcmovae %1, %0" : "+r"(then) : "r"(first), "i"(STEP_ENDS) : "cc");
    return then;
#else
    return first >= STEP_ENDS ? first : then;
#endif
}

// Ends the block or goes on in it, without a branch.
INLINE At end_or_go_on(const Lane *lane, At at, uint64_t reached) {
    at.table = lane->rest[at.block], at.reached = reached & ~(uint64_t)63;
#if defined(__x86_64__) && defined(__GNUC__)
    __asm__("cmp %5, %1\n\tcmovae %3, %0\n\tcmovae %4, %1\n\tsbb $-1, %2"
            : "+r"(at.table), "+r"(at.reached), "+r"(at.block)
            : "m"(lane->first[at.block]), "r"((uint64_t)0), "i"(STEP_ENDS)
            : "cc");
#else
    int ends = at.reached >= STEP_ENDS;
    at.table = ends ? lane->first[at.block] : at.table, at.reached = ends ? 0 : at.reached, at.block += (uint64_t)ends;
#endif
    return at;
}

// Three steps, or as many as the block has; `*is_beyond` when there are none, and then nothing has changed.
INLINE At step_over(const Lane *lane, At at, int *is_beyond) {
    uint64_t following = load_big_endian(lane->scan + (at.place >> 3) + 8) << (at.place & 7), word = at.word;
    const uint16_t *rest = lane->rest[at.block];
    uint64_t step = at.table[word >> (64 - STEP)], one = at.reached + step;
    word <<= step & 63;
    step = rest[word >> (64 - STEP)];
    uint64_t two = one + step;
    word <<= step & 63;
    step = rest[word >> (64 - STEP)];
    uint64_t reached = first_end(one, first_end(two, two + step)), bits = reached & 63;
    if (__builtin_expect((reached & STEP_BEYOND) != 0, 0)) {
        *is_beyond = 1;
        return at;
    }
    at.place += bits;
    at.word = at.word << bits | following >> 1 >> (63 - bits);
    lane->ends[at.block] = (uint32_t)at.place;
    return end_or_go_on(lane, at, reached);
}

// Reads one code, whatever it is.
static void step_over_code(Lane *lane) {
    Bits bits = bits_from(lane->scan, lane->place);
    int before = bits.count, coefficient = (int)(lane->reached / COEFFICIENT);
    uint64_t block = lane->block % (uint64_t)lane->mcu_blocks;
    int32_t unused;
    int run = read_value(&bits, (coefficient ? lane->ac : lane->dc)[block], &unused);
    if (run == NO_CODE || (coefficient && run != NO_MORE && coefficient + run + 1 > 64)) lane->problem = JPEG_BROKEN;
    lane->place += (uint64_t)(before - bits.count);
    coefficient += coefficient ? run + 1 : 1;
    lane->reached = (uint64_t)coefficient * COEFFICIENT, lane->table = lane->rest[lane->block];
    if (coefficient < 64) return;
    lane->ends[lane->block] = (uint32_t)lane->place;
    lane->reached = 0, lane->table = lane->first[lane->block++];
}

// Steps over codes one step at a time, up to one that no step is for, and over that one.
static void step_over_long(Lane *lane) {
    for (int was_long = 0; lane->block < lane->pause && !was_long && !lane->problem;) {
        uint64_t step = lane->table[bits_at(lane->scan, lane->place) >> (64 - STEP)];
        was_long = ((lane->reached + step) & STEP_BEYOND) != 0;
        if (was_long) {
            step_over_code(lane);
        } else {
            lane->place += step % COEFFICIENT;
            lane->ends[lane->block] = (uint32_t)lane->place;
            At at = end_or_go_on(lane, load(lane), lane->reached + step);
            store(lane, at);
        }
    }
}

static void begin_round(Lane *lane) {
    lane->pause = (uint64_t)(lane->left_in_segment < ROUND ? lane->left_in_segment : ROUND);
    lane->block = 0, lane->reached = 0, lane->table = lane->first[lane->mcu_blocks - 1];
}

// Ends a round, and begins the next, which may be in the next of the file's own segments.
static void end_round(Lane *lane) {
    lane->place = lane->ends[lane->pause - 1];
    if (lane->place > (uint64_t)*lane->segments * 8) lane->problem = JPEG_BROKEN;
    lane->ends += lane->pause;
    lane->left -= (int64_t)lane->pause, lane->left_in_segment -= (int64_t)lane->pause;
    if (lane->left_in_segment == 0) {
        lane->place = (uint64_t)*lane->segments++ * 8;
        lane->left_in_segment = lane->left < lane->segment_blocks ? lane->left : lane->segment_blocks;
    }
    begin_round(lane);
}

void jpeg_begin_lane(Lane *lane, int64_t blocks, int64_t segment_blocks) {
    lane->left = blocks, lane->segment_blocks = segment_blocks && segment_blocks < blocks ? segment_blocks : blocks;
    lane->left_in_segment = lane->segment_blocks;
    begin_round(lane);
}

INLINE void run_lanes(Lane *const lanes[LANES]) {
    const Lane *of_a = lanes[0], *of_b = lanes[1], *of_c = lanes[2];
    At a = load(of_a), b = load(of_b), c = load(of_c);
    int a_is_beyond = 0, b_is_beyond = 0, c_is_beyond = 0;
    while (a.block < of_a->pause && b.block < of_b->pause && c.block < of_c->pause) {
        a = step_over(of_a, a, &a_is_beyond);
        b = step_over(of_b, b, &b_is_beyond);
        c = step_over(of_c, c, &c_is_beyond);
        if (__builtin_expect(a_is_beyond | b_is_beyond | c_is_beyond, 0)) break;
    }
    store(lanes[0], a), store(lanes[1], b), store(lanes[2], c);
    if (a_is_beyond) step_over_long(lanes[0]);
    if (b_is_beyond) step_over_long(lanes[1]);
    if (c_is_beyond) step_over_long(lanes[2]);
}

static void run_lanes_portable(Lane *const lanes[LANES]) { run_lanes(lanes); }

#if defined(__x86_64__) && defined(__GNUC__)
// The same, with the shifts that take their count from any register.
__attribute__((target("avx2,bmi,bmi2"))) static void run_lanes_bmi2(Lane *const lanes[LANES]) { run_lanes(lanes); }
#endif

static int has_bmi2(void) {
#if defined(__x86_64__) && defined(__GNUC__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2");
#else
    return 0;
#endif
}

void jpeg_run_lanes(Lane *const lanes[LANES], int portable) {
    int is_fast = !portable && has_bmi2();
    for (;;) {
#if defined(__x86_64__) && defined(__GNUC__)
        (is_fast ? run_lanes_bmi2 : run_lanes_portable)(lanes);
#else
        run_lanes_portable(lanes);
#endif
        int is_one_done = 0;
        for (int i = 0; i < LANES; i++) {
            Lane *lane = lanes[i];
            if (lane->block >= lane->pause) end_round(lane);
            lane->is_done = lane->left == 0 || lane->problem;
            is_one_done |= lane->is_done;
        }
        if (is_one_done) return;
    }
}

void jpeg_idle_lane(Lane *lane) {
    static const uint16_t nothing[STEPS];
    static const uint8_t scan[64];
    *lane = (Lane){.scan = scan, .ends = &lane->nowhere, .table = nothing, .pause = 1, .left = 1, .rest = {nothing}};
}
