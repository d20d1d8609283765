// What the pieces of the JPEG decoder say to each other.
//
//   jpeg_header.c    markers -> Header: size, sampling, tables, where the segments are
//   jpeg_segments.c  the segments that cover a box -> planes of samples (Y, Cb, Cr)
//   jpeg_idct.c      64 coefficients -> 64 samples, the same bits as libjpeg's default (jidctint)
//   jpeg_pixels.c    planes -> RGB, the same bits as libjpeg's defaults (fancy upsampling)
//   jpeg_resize.c    planes -> resized RGB, colours converted for the output's pixels only
//   jpeg_batch.c     what Python calls: a batch of boxes, one box, sizes
//   jpeg_restart.c   a baseline JPEG -> the same with restart markers, its codes copied as they are
//   jpeg_lanes.c     where its blocks end: steps over the codes of several images at once
//   jpeg_steps.c     the tables with which that is done
//   jpeg_rewrite.c   the header and the DC codes of such a JPEG
//   jpeg_pack.c      what Python calls to cut a batch of JPEGs into segments
//   jpeg_libjpeg.c   another library (it needs libjpeg): transcoding and planes of the kinds that only it can read
//
// An MCU is one block of each kind: 16x16 pixels of a 4:2:0 image. A segment is the K MCUs between two restart markers.

#ifndef SHOAL_JPEG_H
#define SHOAL_JPEG_H

#include <stddef.h>
#include <stdint.h>

enum {
    JPEG_OK = 0,
    JPEG_BROKEN = 1,       // not a JPEG, cut short, or its bits make no sense
    JPEG_WRONG_INDEX = 2,  // the index does not belong to this image
    JPEG_UNSUPPORTED = 3,  // a kind that this decoder leaves to another
    JPEG_WRONG_BOX = 4,    // a box outside the image
    JPEG_NO_MEMORY = 5,
    JPEG_OUTSIDE = 6,      // a row or an offset outside its part
};

enum { MOST_SIDE = 65500, MOST_PIXELS = 1 << 28, LOOK = 10, LOOKED = 1 << LOOK };

// What may be read, and is not used, after the end of a buffer: the longest MCU that broken bits can spell is 1,488.
enum { SLACK = 2048 };

// A Huffman table as it is read. LOOK bits give an entry: in bits 0-4 how many bits the code and its value have, 5-8
// how many of them are the value's and still to be read, 9-15 how many zeros come before it (64: no more values), 16-31
// the value where LOOK bits held it whole. An entry of 0 is a longer code, found by its length.
typedef struct {
    int32_t entries[LOOKED];
    int32_t most[18];     // the largest code of each length, shifted to 16 bits; -1 where there is none
    int32_t shift[17];    // what to add to a code of each length for its place in `symbols`
    uint8_t counts[16];   // how many codes of each length the file has
    uint8_t symbols[256];
    int is_there;
    int is_built;         // the entries are those of counts and symbols, also where another file left them
} Huffman;

typedef struct {
    int width, height, num_planes;  // 1 (grey) or 3 (Y, Cb, Cr)
    int h, v;                       // luma samples for one of chroma, along and down: 1 or 2
    int restart;                    // MCUs in a segment; 0: one segment is all
    int mcus_across, mcus_down;
    const uint8_t *data, *scan;
    size_t size;
    int16_t quant[3][64];  // in the order of the file (zigzag)
    uint8_t dc[3], ac[3];  // which table a plane uses
    Huffman tables[2][2];  // [dc or ac][number]
} Header;

// A marker and its contents: `at` begins after the two bytes of its length.
typedef struct {
    int marker;
    const uint8_t *at, *end;
} Marker;

// Samples of one plane: those from (x, y) on, of a plane that is `across` wide and `down` high in all.
typedef struct {
    uint8_t *samples;
    int stride, x, y, across, down;
} Plane;

// The planes of an image, or of a part of it; kind says what they are.
typedef struct {
    enum { PLANES_GREY, PLANES_YCC, PLANES_RGB } kind;
    int width, height;  // of the whole image
    int h, v;
    Plane planes[3];
} Planes;

// Memory that grows and is kept from image to image; one for each thread.
typedef struct {
    void *memory;
    size_t bytes;
} Room;

typedef struct {
    Header header;
    Room planes, offsets, segment, rows, tables;
    int portable;  // for tests: without the instructions that not every processor has
} Workspace;

// Decodes an image of any kind, whole, into `room`: in jpeg_libjpeg.c, NULL where shoal was built without it.
typedef int (*WholeDecoder)(const uint8_t *data, size_t size, Room *room, Planes *planes);

void *room_for(Room *room, size_t bytes);
void free_workspace(Workspace *work);

// Whether a marker has neither length nor contents.
static inline int is_alone(int marker) { return marker == 0x01 || (marker >= 0xD0 && marker <= 0xD9); }

// Moves *at over the next marker; JPEG_BROKEN where there is none.
int jpeg_next_marker(const uint8_t **at, const uint8_t *end, Marker *found);

// `header` is all zeros, or was read before: tables that are the same again are kept.
int jpeg_read_header_of(const uint8_t *data, size_t size, Header *header);
int jpeg_size(const uint8_t *data, size_t size, int *width, int *height);
int64_t jpeg_num_segments(const Header *header);
int jpeg_read_index(const Header *header, const uint8_t *index, size_t index_bytes, uint32_t *offsets);
int jpeg_scan_for_segments(const Header *header, uint32_t *offsets);

// Decodes the MCUs that cover [x0, x1) x [y0, y1). Without an index the markers are looked for.
int jpeg_decode_box(Workspace *work, const uint8_t *index, size_t index_bytes, int x0, int y0, int x1, int y1,
                    Planes *planes);

// The length of a segment as the index has it, see jpeg_read_index: at most 5 bytes; returns where it ends.
static inline uint8_t *write_length(uint8_t *to, size_t bytes) {
    if (bytes < 192) {
        *to++ = (uint8_t)bytes;
    } else if (bytes < 192 + (63 << 8)) {
        *to++ = (uint8_t)(192 + ((bytes - 192) >> 8));
        *to++ = (uint8_t)(bytes - 192);
    } else {
        *to++ = 255;
        for (int shift = 24; shift >= 0; shift -= 8) *to++ = (uint8_t)(bytes >> shift);
    }
    return to;
}

// The codes with which a DC difference of each size is written; length 0: there is none.
typedef struct {
    uint16_t code[16];
    uint8_t length[16];
} DcCodes;

// Where the tables of a JPEG are written that is being cut.
typedef struct {
    uint8_t counts[16];
    uint8_t symbols[256];
    int num_symbols;
} HuffmanText;

// Adds the sizes that a DC table lacks after its longest code, where there is room; codes that are there stay.
int jpeg_extend_dc(const Huffman *table, HuffmanText *text, DcCodes *codes);
// At most what the old header has and MOST_TABLE_BYTES more: its markers, with `restart` and these DC tables; returns
// where the scan begins.
enum { MOST_TABLE_BYTES = 4 * (5 + 16 + 256) + 64 };
uint8_t *jpeg_write_header(const Header *header, int restart, const HuffmanText dc[2], uint8_t *to);

static inline int32_t huffman_entry(int code_bits, int symbol) {
    int size = symbol & 15, run = symbol >> 4;
    if (size == 0 && run < 15) run = 64;
    return run << 9 | size << 5 | (code_bits + size);
}

// 64 coefficients to 8 rows of 8 samples. Rows (0, 4), (2, 6), (1, 5), (3, 7) of the block lie in pairs, column by
// column: (0, 0), (4, 0), (0, 1), (4, 1), ... All give the same bits.
typedef void (*Idct)(const int16_t *block, uint8_t *out, ptrdiff_t stride);
Idct jpeg_idct(int portable);

// rgb[y - y0][x - x0] for the pixels of a box.
int jpeg_to_pixels(Workspace *work, const Planes *planes, int x0, int y0, int x1, int y1, uint8_t *rgb);

typedef struct {
    double x, y, w, h;
    int flip, antialias;
    int out_width, out_height, is_planar;  // [3, H, W] or [H, W, 3]
} Resize;

int jpeg_resize(Workspace *work, const Planes *planes, const Resize *resize, uint8_t *out);

#endif
