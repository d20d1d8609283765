// Decodes only the segments of a JPEG that cover a box, into planes of samples.
//
// 1. The transcoder put a restart marker after every K MCUs, so each segment can be decoded by itself: its bits begin
//    at a byte, and its DC values at 0. The index says how long each segment is.
// 2. The box becomes a range of MCUs. For each row of MCUs: the segments that touch the range are decoded from their
//    beginning (up to K - 1 MCUs too early), and what follows the range is never read. An image without restart markers
//    is one segment: what lies above the box is read, what lies below is not.
// 3. A segment is copied first, without the zero that follows each 0xFF, so that eight bytes can be loaded at any time.
//
// 450x350 pixels in 4:2:0 are 29 x 22 MCUs of 16x16. The box x 100..300, y 50..200 is columns 6..18, rows 3..12:
// 10 x 13 MCUs of 638. With K = 2, row 3 is MCUs 93..105, so segments 46..52.

#include <string.h>

#include "jpeg.h"
#include "jpeg_bits.h"

// Where the coefficients of the file's zigzag order go: rows (0, 4), (2, 6), (1, 5), (3, 7) in pairs, column by column.
static const uint8_t PLACES[64] = {
     0,  2, 32, 16, 34,  4,  6, 36, 18, 48,  1, 50, 20, 38,  8, 10,
    40, 22, 52,  3, 33, 17, 35,  5, 54, 24, 42, 12, 14, 44, 26, 56,
     7, 37, 19, 49, 51, 21, 39,  9, 58, 28, 46, 30, 60, 11, 41, 23,
    53, 55, 25, 43, 13, 62, 15, 45, 27, 57, 59, 29, 47, 31, 61, 63,
};

// Reads a block into `block`, which is all zeros; returns how far its coefficients go (1: the DC alone), 0 when broken.
INLINE int read_block(Bits *bits, const Huffman *dc, const Huffman *ac, const int16_t *quant, uint32_t *last_dc,
                      int16_t *block) {
    int32_t value;
    if (read_value(bits, dc, &value) == NO_CODE) return 0;
    *last_dc += (uint32_t)value;  // unsigned: broken bits may spell anything
    block[0] = (int16_t)(*last_dc * (uint32_t)quant[0]);
    int reached = 1;
    for (int k = 1; k < 64; k++) {
        int run = read_value(bits, ac, &value);
        k += run;
        if (k > 63) return run == NO_MORE ? reached : 0;
        block[PLACES[k]] = (int16_t)(value * quant[k]);
        reached = k + 1;
    }
    return reached;
}

// Every sample of a block that has only a DC.
INLINE void fill_block(int16_t dc, uint8_t *out, ptrdiff_t stride) {
    int sample = (((int32_t)dc * 4 + 16) >> 5) + 128;
    int value = sample < 0 ? 0 : sample > 255 ? 255 : sample;
    for (int row = 0; row < 8; row++) memset(out + row * stride, value, 8);
}

// Copies a segment without the zeros after 0xFF; returns where it ends, NULL when a marker is in it.
static uint8_t *unstuff(const uint8_t *from, const uint8_t *end, uint8_t *to) {
    while (from < end) {
        const uint8_t *mark = memchr(from, 0xFF, (size_t)(end - from));
        size_t plain = (size_t)((mark ? mark + 1 : end) - from);
        memcpy(to, from, plain);
        to += plain, from += plain;
        if (mark == NULL) break;
        if (from < end && *from != 0) return NULL;
        from++;
    }
    memset(to, 0, 64);
    return to;
}

// What is decoded: columns [c0, c1) and rows [r0, r1) of MCUs.
typedef struct {
    const Header *header;
    const Planes *planes;
    Idct idct;
    uint8_t *copy;
    int c0, r0, c1, r1;
} Decoding;

// Decodes the blocks of one MCU; they go into the planes where `row` is not negative.
INLINE int read_mcu(const Decoding *decoding, Bits *bits, uint32_t *dc, int row, int column) {
    _Alignas(32) int16_t block[64];
    const Header *header = decoding->header;
    for (int plane = 0; plane < header->num_planes; plane++) {
        int h = plane ? 1 : header->h, v = plane ? 1 : header->v;
        const Plane *to = &decoding->planes->planes[plane];
        const Huffman *of_dc = &header->tables[0][header->dc[plane]], *of_ac = &header->tables[1][header->ac[plane]];
        for (int y = 0; y < v; y++) {
            ptrdiff_t place = (ptrdiff_t)(row * v + y) * 8 * to->stride + (ptrdiff_t)column * h * 8;
            for (int x = 0; x < h; x++, place += 8) {
                memset(block, 0, sizeof block);
                int reached = read_block(bits, of_dc, of_ac, header->quant[plane], &dc[plane], block);
                if (reached == 0) return JPEG_BROKEN;
                if (row < 0) continue;
                if (reached == 1) fill_block(block[0], to->samples + place, to->stride);
                else decoding->idct(block, to->samples + place, to->stride);
            }
        }
    }
    return JPEG_OK;
}

// Decodes the MCUs [first, end) of a segment; those that are wanted go into the planes.
INLINE int read_segment(const Decoding *decoding, const uint8_t *from, const uint8_t *until, int64_t first,
                        int64_t end) {
    const uint8_t *stop = unstuff(from, until, decoding->copy);
    if (stop == NULL) return JPEG_BROKEN;
    Bits bits = {.at = decoding->copy};
    uint32_t dc[3] = {0, 0, 0};
    int across = decoding->header->mcus_across, row = (int)(first / across), column = (int)(first % across);
    for (int64_t mcu = first; mcu < end; mcu++) {
        int is_wanted = column >= decoding->c0 && column < decoding->c1 && row >= decoding->r0;
        int problem = read_mcu(decoding, &bits, dc, is_wanted ? row - decoding->r0 : -1, column - decoding->c0);
        if (problem) return problem;
        if ((bits.at - decoding->copy) * 8 - bits.count > (stop - decoding->copy) * 8) return JPEG_BROKEN;
        if (++column == across) column = 0, row++;
    }
    return JPEG_OK;
}

typedef int (*ReadSegment)(const Decoding *, const uint8_t *, const uint8_t *, int64_t, int64_t);

static int read_segment_portable(const Decoding *decoding, const uint8_t *from, const uint8_t *until, int64_t first,
                                 int64_t end) {
    return read_segment(decoding, from, until, first, end);
}

#if defined(__x86_64__) && defined(__GNUC__)
// The same, with the shifts that take their count from any register.
__attribute__((target("avx2,bmi,bmi2")))
static int read_segment_bmi2(const Decoding *decoding, const uint8_t *from, const uint8_t *until, int64_t first,
                             int64_t end) {
    return read_segment(decoding, from, until, first, end);
}
#endif

static ReadSegment best_reader(int portable) {
#if defined(__x86_64__) && defined(__GNUC__)
    if (!portable && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2")) return read_segment_bmi2;
#endif
    (void)portable;
    return read_segment_portable;
}

// The samples of columns [c0, c1) x rows [r0, r1) of MCUs get a place; the planes say where they lie in the image.
static int make_planes(Workspace *work, int c0, int r0, int c1, int r1, Planes *planes) {
    const Header *header = &work->header;
    *planes = (Planes){.kind = header->num_planes == 1 ? PLANES_GREY : PLANES_YCC, .width = header->width,
                       .height = header->height, .h = header->h, .v = header->v};
    size_t bytes = 0;
    for (int plane = 0; plane < header->num_planes; plane++) {
        int h = plane ? 1 : header->h, v = plane ? 1 : header->v;
        int across = plane ? (header->width + header->h - 1) / header->h : header->width;
        int down = plane ? (header->height + header->v - 1) / header->v : header->height;
        planes->planes[plane] = (Plane){.stride = (c1 - c0) * 8 * h, .x = c0 * 8 * h, .y = r0 * 8 * v, .across = across,
                                        .down = down};
        bytes += (size_t)planes->planes[plane].stride * (size_t)(r1 - r0) * 8 * (size_t)v;
    }
    uint8_t *samples = room_for(&work->planes, bytes + SLACK);
    if (samples == NULL) return JPEG_NO_MEMORY;
    for (int plane = 0; plane < header->num_planes; plane++) {
        planes->planes[plane].samples = samples;
        samples += (size_t)planes->planes[plane].stride * (size_t)(r1 - r0) * 8 * (size_t)(plane ? 1 : header->v);
    }
    return JPEG_OK;
}

// Where segments begin, by the index or by looking.
static int find_segments(Workspace *work, const uint8_t *index, size_t index_bytes, uint32_t **offsets) {
    const Header *header = &work->header;
    int64_t num_segments = jpeg_num_segments(header);
    if (index_bytes && (header->restart == 0 || num_segments > (int64_t)index_bytes)) return JPEG_WRONG_INDEX;
    if (num_segments > (int64_t)header->size) return JPEG_BROKEN;
    *offsets = room_for(&work->offsets, sizeof(uint32_t) * (size_t)(num_segments + 1));
    if (*offsets == NULL) return JPEG_NO_MEMORY;
    if (index_bytes == 0) return jpeg_scan_for_segments(header, *offsets);
    return jpeg_read_index(header, index, index_bytes, *offsets);
}

// One after the last MCU before `end` that is wanted.
static int64_t end_of_wanted(const Decoding *decoding, int64_t end) {
    int64_t across = decoding->header->mcus_across, row = (end - 1) / across, column = (end - 1) % across;
    if (row >= decoding->r1) return (decoding->r1 - 1) * across + decoding->c1;
    if (column < decoding->c0) return (row - 1) * across + decoding->c1;
    return column < decoding->c1 ? end : row * across + decoding->c1;
}

static int decode_segment(Workspace *work, Decoding *decoding, ReadSegment read, const uint32_t *offsets,
                          int64_t segment, int has_index) {
    const Header *header = decoding->header;
    int64_t num_segments = jpeg_num_segments(header), mcus = (int64_t)header->mcus_across * header->mcus_down;
    int64_t k = header->restart ? header->restart : mcus, end = (segment + 1) * k;
    const uint8_t *from = header->data + offsets[segment], *until = header->data + offsets[segment + 1] - 2;
    int is_last = segment + 1 == num_segments, marker = is_last ? 0xD9 : 0xD0 + (int)(segment & 7);
    if (until[0] != 0xFF || until[1] != marker) return has_index ? JPEG_WRONG_INDEX : JPEG_BROKEN;
    decoding->copy = room_for(&work->segment, (size_t)(until - from) + SLACK);
    if (decoding->copy == NULL) return JPEG_NO_MEMORY;
    return read(decoding, from, until, segment * k, end_of_wanted(decoding, end < mcus ? end : mcus));
}

int jpeg_decode_box(Workspace *work, const uint8_t *index, size_t index_bytes, int x0, int y0, int x1, int y1,
                    Planes *planes) {
    const Header *header = &work->header;
    uint32_t *offsets;
    int problem = find_segments(work, index, index_bytes, &offsets);
    if (problem) return problem;
    int wide = 8 * header->h, high = 8 * header->v;
    Decoding decoding = {.header = header, .planes = planes, .idct = jpeg_idct(work->portable), .c0 = x0 / wide,
                         .r0 = y0 / high, .c1 = (x1 + wide - 1) / wide, .r1 = (y1 + high - 1) / high};
    problem = make_planes(work, decoding.c0, decoding.r0, decoding.c1, decoding.r1, planes);
    ReadSegment read = best_reader(work->portable);
    int64_t k = header->restart ? header->restart : (int64_t)header->mcus_across * header->mcus_down, next = 0;
    for (int row = decoding.r0; row < decoding.r1 && !problem; row++) {
        int64_t begin = (int64_t)row * header->mcus_across + decoding.c0, end = begin + decoding.c1 - decoding.c0;
        if (next < begin / k) next = begin / k;
        for (; next * k < end && !problem; next++)
            problem = decode_segment(work, &decoding, read, offsets, next, index_bytes > 0);
    }
    return problem;
}
