// Reads the markers of a JPEG up to its first scan, builds the tables that decode it, and finds its segments.

#include <stdlib.h>
#include <string.h>

#include "jpeg.h"

// Sanitizers see what lies beyond a room only where it is made anew for each image, and no larger than it is asked for.
#ifdef SHOAL_EXACT_ROOMS
enum { IS_EXACT = 1 };
#else
enum { IS_EXACT = 0 };
#endif

void *room_for(Room *room, size_t bytes) {
    if (room->bytes >= bytes && !IS_EXACT) return room->memory;
    free(room->memory);
    room->bytes = 0;
    room->memory = NULL;
    size_t rounded = IS_EXACT ? (bytes + 63) & ~(size_t)63 : (bytes + bytes / 4 + 4095) & ~(size_t)63;
    void *memory = aligned_alloc(64, rounded);
    if (memory == NULL) return NULL;
    room->memory = memset(memory, 0, rounded);
    room->bytes = bytes;
    return memory;
}

void free_workspace(Workspace *work) {
    Room *rooms[] = {&work->planes, &work->offsets, &work->segment, &work->rows, &work->tables};
    for (size_t i = 0; i < sizeof rooms / sizeof *rooms; i++) free(rooms[i]->memory);
}

int jpeg_next_marker(const uint8_t **at, const uint8_t *end, Marker *found) {
    const uint8_t *p = *at;
    if (end - p < 2 || p[0] != 0xFF) return JPEG_BROKEN;
    while (p < end && *p == 0xFF) p++;  // any number of them may fill the gap
    if (p >= end || *p == 0) return JPEG_BROKEN;  // FF 00 is data; libjpeg would look further on, and read another image
    found->marker = *p++;
    found->at = found->end = p;
    if (!is_alone(found->marker)) {
        if (end - p < 2) return JPEG_BROKEN;
        size_t length = (size_t)p[0] << 8 | p[1];
        if (length < 2 || length > (size_t)(end - p)) return JPEG_BROKEN;
        found->at = p + 2, found->end = p + length;
    }
    *at = found->end;
    return JPEG_OK;
}

static int is_frame(int marker) {
    return marker >= 0xC0 && marker <= 0xCF && marker != 0xC4 && marker != 0xC8 && marker != 0xCC;
}

// Fills one table's entries from its codes, which are counted by length: a code and, where there is room, its bits too.
static void fill_entries(Huffman *table, const uint8_t *counts) {
    memset(table->entries, 0, sizeof table->entries);
    int32_t code = 0, place = 0;
    for (int length = 1; length <= LOOK; length++, code <<= 1) {
        for (int i = 0; i < counts[length - 1]; i++, code++, place++) {
            int32_t whole = huffman_entry(length, table->symbols[place]);
            int size = whole >> 5 & 15, spare = LOOK - length;
            int32_t *entry = table->entries + ((size_t)code << spare);
            for (int32_t bits = 0; bits < 1 << spare; bits++) {
                if (size == 0 || size > spare) {
                    entry[bits] = whole;
                    continue;
                }
                int32_t value = bits >> (spare - size);
                if (value < 1 << (size - 1)) value -= (1 << size) - 1;
                entry[bits] = (int32_t)((uint32_t)value << 16) | (whole & ~(15 << 5));
            }
        }
    }
}

static int build_table(Huffman *table, const uint8_t *counts, const uint8_t *symbols, int num_symbols) {
    table->is_there = 1;
    if (table->is_built && memcmp(table->counts, counts, 16) == 0 &&
        memcmp(table->symbols, symbols, (size_t)num_symbols) == 0)
        return JPEG_OK;  // most files of one camera or program have the same
    table->is_built = 0;
    memcpy(table->counts, counts, 16);
    memset(table->symbols, 0, sizeof table->symbols);
    memcpy(table->symbols, symbols, (size_t)num_symbols);
    int32_t code = 0, place = 0;
    for (int length = 1; length <= 16; length++, code <<= 1) {
        table->shift[length] = place - code;
        code += counts[length - 1], place += counts[length - 1];
        if (code > 1 << length) return JPEG_BROKEN;  // more codes than there can be
        table->most[length] = counts[length - 1] ? ((code - 1) << (16 - length)) | ((1 << (16 - length)) - 1) : -1;
    }
    table->most[17] = INT32_MAX;
    fill_entries(table, counts);
    table->is_built = 1;
    return JPEG_OK;
}

static int read_huffman(Header *header, Marker found) {
    for (const uint8_t *p = found.at; p < found.end;) {
        if (found.end - p < 17) return JPEG_BROKEN;
        int is_ac = p[0] >> 4, number = p[0] & 15, num_symbols = 0;
        if (is_ac > 1 || number > 1) return JPEG_UNSUPPORTED;
        for (int i = 1; i <= 16; i++) num_symbols += p[i];
        if (num_symbols > 256 || num_symbols > found.end - p - 17) return JPEG_BROKEN;
        int problem = build_table(&header->tables[is_ac][number], p + 1, p + 17, num_symbols);
        if (problem) return problem;
        p += 17 + num_symbols;
    }
    return JPEG_OK;
}

typedef struct {
    uint16_t values[4][64];
    uint8_t is_there[4], id[3], h[3], v[3], quant[3];
    int is_jfif, is_adobe, adobe_transform;
} Frame;

static void read_application(Frame *frame, Marker found) {
    ptrdiff_t bytes = found.end - found.at;
    if (found.marker == 0xE0 && bytes >= 14 && memcmp(found.at, "JFIF", 5) == 0) frame->is_jfif = 1;
    if (found.marker != 0xEE || bytes < 12 || memcmp(found.at, "Adobe", 5) != 0) return;
    frame->is_adobe = 1, frame->adobe_transform = found.at[11];
}

// Three planes are Y, Cb, Cr unless something says otherwise: libjpeg's rules.
static int is_rgb(const Frame *frame) {
    if (frame->is_jfif) return 0;
    if (frame->is_adobe) return frame->adobe_transform == 0;
    return frame->id[0] == 'R' && frame->id[1] == 'G' && frame->id[2] == 'B';
}

static int read_quant(Frame *frame, Marker found) {
    for (const uint8_t *p = found.at; p < found.end;) {
        int is_wide = *p >> 4, number = *p & 15;
        p++;
        if (is_wide > 1 || number > 3 || found.end - p < (64 << is_wide)) return JPEG_BROKEN;
        for (int i = 0; i < 64; i++, p += 1 + is_wide)
            frame->values[number][i] = is_wide ? (uint16_t)(p[0] << 8 | p[1]) : p[0];
        frame->is_there[number] = 1;
    }
    return JPEG_OK;
}

static int read_size(Marker found, int *width, int *height) {
    if (found.end - found.at < 6) return JPEG_BROKEN;
    *height = found.at[1] << 8 | found.at[2], *width = found.at[3] << 8 | found.at[4];
    if (*width < 1 || *height < 1 || *width > MOST_SIDE || *height > MOST_SIDE) return JPEG_BROKEN;
    return (int64_t)*width * *height > MOST_PIXELS ? JPEG_UNSUPPORTED : JPEG_OK;
}

static int read_frame(Header *header, Frame *frame, Marker found) {
    int problem = read_size(found, &header->width, &header->height);
    if (problem) return problem;
    int num_planes = found.at[5];
    if (found.at[0] != 8 || (num_planes != 1 && num_planes != 3)) return JPEG_UNSUPPORTED;
    if (found.end - found.at < 6 + 3 * num_planes) return JPEG_BROKEN;
    for (int i = 0; i < num_planes; i++) {
        const uint8_t *p = found.at + 6 + 3 * i;
        frame->id[i] = p[0], frame->h[i] = p[1] >> 4, frame->v[i] = p[1] & 15, frame->quant[i] = p[2];
        if (p[2] > 3) return JPEG_BROKEN;
    }
    int is_grey = num_planes == 1;  // its MCU is one block, whatever it says of sampling
    header->h = is_grey ? 1 : frame->h[0], header->v = is_grey ? 1 : frame->v[0];
    if (header->h < 1 || header->h > 2 || header->v < 1 || header->v > 2) return JPEG_UNSUPPORTED;
    for (int i = 1; i < num_planes; i++)
        if (frame->h[i] != 1 || frame->v[i] != 1) return JPEG_UNSUPPORTED;
    header->num_planes = num_planes;
    header->mcus_across = (header->width + 8 * header->h - 1) / (8 * header->h);
    header->mcus_down = (header->height + 8 * header->v - 1) / (8 * header->v);
    return JPEG_OK;
}

// One scan of all planes, baseline: what the transcoder writes.
static int read_scan(Header *header, const Frame *frame, Marker found) {
    const uint8_t *p = found.at;
    int n = header->num_planes;
    if (n == 0 || found.end - p < 1 || found.end - p < 4 + 2 * p[0]) return JPEG_BROKEN;
    if (p[0] != n || (n == 3 && is_rgb(frame))) return JPEG_UNSUPPORTED;
    for (int i = 0; i < n; i++) {
        int dc = p[2 + 2 * i] >> 4, ac = p[2 + 2 * i] & 15, quant = frame->quant[i];
        if (p[1 + 2 * i] != frame->id[i] || dc > 1 || ac > 1) return JPEG_UNSUPPORTED;
        if (!header->tables[0][dc].is_there || !header->tables[1][ac].is_there || !frame->is_there[quant])
            return JPEG_BROKEN;
        header->dc[i] = (uint8_t)dc, header->ac[i] = (uint8_t)ac;
        for (int k = 0; k < 64; k++) header->quant[i][k] = (int16_t)frame->values[quant][k];
    }
    if (p[1 + 2 * n] != 0 || p[2 + 2 * n] != 63 || p[3 + 2 * n] != 0) return JPEG_UNSUPPORTED;
    header->scan = found.end;
    return JPEG_OK;
}

// Reads a baseline JPEG up to its scan; JPEG_UNSUPPORTED for every other kind.
int jpeg_read_header_of(const uint8_t *data, size_t size, Header *header) {
    Frame frame = {0};
    Marker found;
    for (int i = 0; i < 4; i++) header->tables[i / 2][i % 2].is_there = 0;
    header->num_planes = header->restart = 0;
    header->data = data, header->size = size;
    const uint8_t *at = data + 2, *end = data + size;
    if (size < 4 || data[0] != 0xFF || data[1] != 0xD8) return JPEG_BROKEN;
    if (size > UINT32_MAX) return JPEG_UNSUPPORTED;
    for (;;) {
        int problem = jpeg_next_marker(&at, end, &found);
        if (problem) return problem;
        if (found.marker == 0xDA) return read_scan(header, &frame, found);
        if (found.marker == 0xC0 || found.marker == 0xC1) problem = read_frame(header, &frame, found);
        else if (is_frame(found.marker)) problem = JPEG_UNSUPPORTED;
        else if (found.marker == 0xC4) problem = read_huffman(header, found);
        else if (found.marker == 0xDB) problem = read_quant(&frame, found);
        else if (found.marker == 0xDD && found.end - found.at >= 2) header->restart = found.at[0] << 8 | found.at[1];
        else if (found.marker == 0xD9) problem = JPEG_BROKEN;
        else read_application(&frame, found);
        if (problem) return problem;
    }
}

// The size of a JPEG of any kind.
int jpeg_size(const uint8_t *data, size_t size, int *width, int *height) {
    Marker found;
    const uint8_t *at = data + 2, *end = data + size;
    if (size < 4 || data[0] != 0xFF || data[1] != 0xD8) return JPEG_BROKEN;
    for (;;) {
        int problem = jpeg_next_marker(&at, end, &found);
        if (problem) return problem;
        if (is_frame(found.marker)) return read_size(found, width, height);
        if (found.marker == 0xDA || found.marker == 0xD9) return JPEG_BROKEN;
    }
}

int64_t jpeg_num_segments(const Header *header) {
    int64_t mcus = (int64_t)header->mcus_across * header->mcus_down;
    return header->restart ? (mcus + header->restart - 1) / header->restart : 1;
}

// Writes where each segment begins in the file, and where the last one ends. The index is a 1 (its version), then the
// bytes of each segment without the marker after it: one byte below 192, two from there to 16,319 (192 + high, low),
// else 255 and four bytes, the largest first.
int jpeg_read_index(const Header *header, const uint8_t *index, size_t index_bytes, uint32_t *offsets) {
    const uint8_t *p = index + 1, *end = index + index_bytes;
    uint64_t at = (uint64_t)(header->scan - header->data);
    int64_t num_segments = jpeg_num_segments(header);
    if (index_bytes < 1 || index[0] != 1) return JPEG_WRONG_INDEX;
    for (int64_t i = 0; i < num_segments; i++) {
        if (p >= end) return JPEG_WRONG_INDEX;
        uint64_t bytes = *p++;
        if (bytes == 255) {
            if (end - p < 4) return JPEG_WRONG_INDEX;
            bytes = (uint64_t)p[0] << 24 | (uint64_t)p[1] << 16 | (uint64_t)p[2] << 8 | p[3];
            p += 4;
        } else if (bytes >= 192) {
            if (p >= end) return JPEG_WRONG_INDEX;
            bytes = 192 + ((bytes - 192) << 8) + *p++;
        }
        offsets[i] = (uint32_t)at;
        at += bytes + 2;
        if (at > header->size) return JPEG_WRONG_INDEX;
    }
    offsets[num_segments] = (uint32_t)at;
    return p == end ? JPEG_OK : JPEG_WRONG_INDEX;
}

// The same, by looking for the markers: of an image without an index.
int jpeg_scan_for_segments(const Header *header, uint32_t *offsets) {
    const uint8_t *p = header->scan, *end = header->data + header->size;
    int64_t num_segments = jpeg_num_segments(header), found = 0;
    offsets[0] = (uint32_t)(p - header->data);
    while (found < num_segments) {
        p = end - p > 1 ? memchr(p, 0xFF, (size_t)(end - p - 1)) : NULL;
        if (p == NULL) return JPEG_BROKEN;
        p += 2;
        if (p[-1] != 0) offsets[++found] = (uint32_t)(p - header->data);
    }
    return JPEG_OK;
}
