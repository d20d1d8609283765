// Cuts a baseline JPEG into segments: a restart marker after every K MCUs, and nothing is encoded anew.
//
// 1. The scan is copied without the zero that follows each 0xFF, up to the next marker.
// 2. Its codes are stepped over, to know where each MCU ends. Of AC codes only their lengths matter: STEP bits give all
//    the codes that lie in them whole, with their values, at once. DC codes are read, as differences add up.
// 3. The first DC difference of each plane in a segment counts from 0: it is written anew. All bits between two of these
//    are copied, eight bytes at a time, shifted to where they come to lie.
// 4. A segment is filled with ones to a whole byte, the marker follows, and its length goes into the index.
// 5. Markers that the file has had already are left out: the first DC differences after one are written anew, too.
//
// 450x350 pixels in 4:2:0 are 638 MCUs; with K = 2, 319 segments: 957 DC codes are written, 44 kB copied in 1,276 pieces.

#include <stdlib.h>
#include <string.h>

#include "jpeg.h"
#include "jpeg_bits.h"
#include "jpeg_steps.h"

struct Cutter {
    Header header;
    Steps steps[2];
    Sizes sizes[2];
    Room scan, out, index;
    int portable;
};

typedef struct {
    const Header *header;
    const Steps *steps;
    const Sizes *sizes;
    DcCodes codes[2];
    const uint8_t *from;  // the bits of the file's own segment that is being read
    Bits bits;
    size_t copied;        // how many of them have been written
    Out out;
    int32_t dc[3], before[3];  // of each plane, the last DC; and what the next that is written anew counts from
    int anew;             // the planes of which it is, as bits
} Cut;

INLINE size_t bits_read(const Cut *cut, const Bits *bits) {
    return (size_t)(bits->at - cut->from) * 8 - (size_t)bits->count;
}

// Steps over one AC code; returns the next coefficient: 64 at the end of the block, 0 when broken.
static int step_over_one(Bits *bits, const Huffman *ac, int k) {
    int32_t unused;
    int run = read_value(bits, ac, &unused);
    k += run + 1;
    if (k > 64) return run == NO_MORE ? 64 : 0;
    return k;
}

// Steps over the rest of a block; returns 0 when broken.
INLINE int step_over_block(Bits *bits, const Huffman *ac, const uint16_t *steps) {
    for (int k = 1; k < 64;) {
        refill(bits);
        uint32_t step, next;
        for (int twice = 0; twice < 2; twice++) {  // a step takes at most 27 of 56 bits
            step = steps[bits->bits >> (64 - STEP)], next = (uint32_t)k + (step >> 6);
            if (next >= 64) break;
            bits->bits <<= step & 63, bits->count -= (int)(step & 63), k = (int)next;
        }
        if (next < 64) continue;
        if (!(step & STEP_LONG) && (next & (BLOCK_ENDS - 1)) <= 64) {
            bits->bits <<= step & 63, bits->count -= (int)(step & 63);
            return 1;
        }
        k = step_over_one(bits, ac, k);  // a long code, or a step that goes beyond the block
        if (k == 0) return 0;
    }
    return 1;
}

// Reads a DC difference; returns 0 when there is no such code.
INLINE int read_difference(Bits *bits, const Huffman *dc, const uint16_t *sizes, int32_t *difference) {
    refill(bits);
    uint32_t found = sizes[bits->bits >> (64 - LOOK)];
    if (__builtin_expect(found == 0, 0)) return read_value(bits, dc, difference) != NO_CODE;
    int length = (int)(found & 15), size = (int)(found >> 8);
    uint64_t value = bits->bits << length;
    int32_t below = (int32_t)(~value >> 63) * (1 - (1 << size));  // a value that begins with 0 is negative
    *difference = (int32_t)(value >> 1 >> (63 - size)) + below;
    bits->bits = value << size, bits->count -= length + size;
    return 1;
}

// Writes what comes before a DC difference, and this one in place of the bits [begin, end).
static int write_dc(Cut *cut, int plane, int32_t difference, size_t begin, size_t end) {
    const DcCodes *codes = &cut->codes[cut->header->dc[plane]];
    uint32_t high = (uint32_t)(difference < 0 ? -difference : difference);
    int size = high ? 32 - __builtin_clz(high) : 0;
    if (size > 15 || codes->length[size] == 0) return JPEG_UNSUPPORTED;
    int count = codes->length[size] + size;
    uint64_t value = (uint64_t)(difference < 0 ? difference - 1 : difference) & ((1u << size) - 1);
    value |= (uint64_t)codes->code[size] << size;
    copy_bits(&cut->out, cut->from, cut->copied, begin);
    write_bits(&cut->out, value << (64 - count), count);
    cut->copied = end;
    return JPEG_OK;
}

INLINE int step_over_mcu(Cut *cut) {
    const Header *header = cut->header;
    Bits bits = cut->bits;
    for (int plane = 0; plane < header->num_planes; plane++) {
        const Huffman *of_dc = &header->tables[0][header->dc[plane]], *of_ac = &header->tables[1][header->ac[plane]];
        const uint16_t *sizes = cut->sizes[header->dc[plane]].sizes, *steps = cut->steps[header->ac[plane]].steps;
        int32_t dc = cut->dc[plane], difference;
        for (int block = plane ? 1 : header->h * header->v; block > 0; block--) {
            size_t begin = bits_read(cut, &bits);
            if (!read_difference(&bits, of_dc, sizes, &difference)) return JPEG_BROKEN;
            dc = (int32_t)((uint32_t)dc + (uint32_t)difference);  // unsigned: broken bits may spell anything
            if (__builtin_expect(cut->anew >> plane & 1, 0)) {
                if (dc > 32767 || dc < -32767) return JPEG_UNSUPPORTED;
                int problem = write_dc(cut, plane, dc - cut->before[plane], begin, bits_read(cut, &bits));
                if (problem) return problem;
                cut->anew &= ~(1 << plane);
            }
            if (!step_over_block(&bits, of_ac, steps)) return JPEG_BROKEN;
        }
        cut->dc[plane] = dc;
    }
    cut->bits = bits;
    return JPEG_OK;
}

// Copies bytes without the zeros after 0xFF, up to a marker; returns where that is, NULL when there is none.
static const uint8_t *unstuff(const uint8_t *from, const uint8_t *end, uint8_t *to, uint8_t **stop) {
    for (;;) {
        const uint8_t *mark = end - from > 1 ? memchr(from, 0xFF, (size_t)(end - from - 1)) : NULL;
        if (mark == NULL) return NULL;
        size_t plain = (size_t)(mark + 1 - from);
        memcpy(to, from, plain);
        to += plain, from += plain + 1;
        if (mark[1] == 0) continue;
        memset(to - 1, 0, 64);
        *stop = to - 1;
        return mark;
    }
}

// The file's own segment begins: its DC differences count from 0.
INLINE void begin_reading(Cut *cut) {
    for (int plane = 0; plane < 3; plane++) {
        if (!(cut->anew >> plane & 1)) cut->before[plane] = cut->dc[plane];
        cut->dc[plane] = 0;
    }
    cut->anew = 7, cut->copied = 0;
    cut->bits = (Bits){.at = cut->from};
}

// Writes all segments, and the index; *at moves behind the scan.
INLINE int cut_scan(Cut *cut, uint8_t *scan, int64_t restart, const uint8_t **at, uint8_t **index) {
    const Header *header = cut->header;
    const uint8_t *end = header->data + header->size, *begin = cut->out.to;
    int64_t mcus = (int64_t)header->mcus_across * header->mcus_down, old = header->restart ? header->restart : mcus;
    int64_t until_old = 0, until_new = restart, number = 0, old_number = 0;
    uint8_t *stop = scan;
    for (int64_t mcu = 0; mcu < mcus; mcu++) {
        if (until_old == 0) {
            if (mcu && (*at)[1] != 0xD0 + (old_number++ & 7)) return JPEG_UNSUPPORTED;
            *at = unstuff(mcu ? *at + 2 : *at, end, scan, &stop);
            if (*at == NULL) return JPEG_BROKEN;
            cut->from = scan, until_old = old;
            begin_reading(cut);
        }
        int problem = step_over_mcu(cut);
        if (problem) return problem;
        size_t read = bits_read(cut, &cut->bits);
        if (read > (size_t)(stop - scan) * 8) return JPEG_BROKEN;
        int is_last = mcu + 1 == mcus, ends_old = --until_old == 0, ends_new = --until_new == 0 || is_last;
        if (ends_old || ends_new)  // what was read is written before it is overwritten
            copy_bits(&cut->out, scan, cut->copied, read), cut->copied = read;
        if (!ends_new) continue;
        end_segment(&cut->out, is_last ? 0xD9 : 0xD0 + (int)(number++ & 7));
        *index = write_length(*index, (size_t)(cut->out.to - begin) - 2);
        begin = cut->out.to, until_new = restart, cut->anew = 7;
        memset(cut->before, 0, sizeof cut->before);
    }
    return (*at)[1] == 0xD9 ? JPEG_OK : JPEG_UNSUPPORTED;  // more scans follow, or a height that comes late
}

typedef int (*CutScan)(Cut *, uint8_t *, int64_t, const uint8_t **, uint8_t **);

static int cut_scan_portable(Cut *cut, uint8_t *scan, int64_t restart, const uint8_t **at, uint8_t **index) {
    return cut_scan(cut, scan, restart, at, index);
}

#if defined(__x86_64__) && defined(__GNUC__)
// The same, with the shifts that take their count from any register.
__attribute__((target("avx2,bmi,bmi2")))
static int cut_scan_bmi2(Cut *cut, uint8_t *scan, int64_t restart, const uint8_t **at, uint8_t **index) {
    return cut_scan(cut, scan, restart, at, index);
}
#endif

static CutScan best_cutter(int portable) {
#if defined(__x86_64__) && defined(__GNUC__)
    if (!portable && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2")) return cut_scan_bmi2;
#endif
    (void)portable;
    return cut_scan_portable;
}

Cutter *jpeg_new_cutter(int portable) {
    Cutter *cutter = calloc(1, sizeof *cutter);
    if (cutter != NULL) cutter->portable = portable;
    return cutter;
}

void jpeg_free_cutter(Cutter *cutter) {
    if (cutter == NULL) return;
    Room *rooms[] = {&cutter->scan, &cutter->out, &cutter->index};
    for (size_t i = 0; i < sizeof rooms / sizeof *rooms; i++) free(rooms[i]->memory);
    free(cutter);
}

int jpeg_cut(Cutter *cutter, const uint8_t *data, size_t size, int restart, const uint8_t **out, size_t *out_bytes,
             const uint8_t **index, size_t *index_bytes) {
    Header *header = &cutter->header;
    HuffmanText dc[2];
    Cut cut = {.header = header, .steps = cutter->steps, .sizes = cutter->sizes, .anew = 7};
    int problem = jpeg_read_header_of(data, size, header);
    for (int i = 0; i < header->num_planes && !problem; i++) {
        problem = jpeg_extend_dc(&header->tables[0][header->dc[i]], &dc[header->dc[i]], &cut.codes[header->dc[i]]);
        jpeg_build_sizes(&cutter->sizes[header->dc[i]], &header->tables[0][header->dc[i]]);
        jpeg_build_steps(&cutter->steps[header->ac[i]], &header->tables[1][header->ac[i]]);
    }
    if (problem) return problem;
    int64_t k = header->h == 2 ? restart : 2 * (int64_t)restart, mcus = (int64_t)header->mcus_across * header->mcus_down;
    int64_t blocks = mcus * (header->num_planes == 1 ? 1 : header->h * header->v + 2);
    size_t scan_bytes = (size_t)(data + size - header->scan), header_bytes = (size_t)(header->scan - data);
    if ((size_t)blocks > 4 * scan_bytes) return JPEG_BROKEN;  // a block has two codes: 2 bits at least
    size_t segments = (size_t)((mcus + k - 1) / k), more = segments;
    if (header->restart) more += (size_t)(mcus / header->restart + 1);
    uint8_t *scan = room_for(&cutter->scan, scan_bytes + SLACK), *lengths = room_for(&cutter->index, 5 * segments + 1);
    uint8_t *to = room_for(&cutter->out, header_bytes + MOST_TABLE_BYTES + 2 * scan_bytes + 32 * more + SLACK);
    if (scan == NULL || lengths == NULL || to == NULL) return JPEG_NO_MEMORY;
    const uint8_t *at = header->scan;
    *out = to, *index = lengths, *lengths++ = 1;
    cut.out.to = jpeg_write_header(header, (int)k, dc, to);
    problem = best_cutter(cutter->portable)(&cut, scan, k, &at, &lengths);
    *out_bytes = (size_t)(cut.out.to - *out), *index_bytes = (size_t)(lengths - *index);
    return problem;
}
