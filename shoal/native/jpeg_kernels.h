// The four loops of resizing, and the tables they read: jpeg_resize.c fills these, jpeg_kernels.c has the loops.

#ifndef SHOAL_JPEG_KERNELS_H
#define SHOAL_JPEG_KERNELS_H

#include "jpeg.h"

enum { WEIGHT_BITS = 14, DOWN_SHIFT = 7, ALONG_SHIFT = 15, FRACTION_BITS = 6 };

// Output i is the sum of weight x sample over the `pairs` pairs of samples from low + first[i] on.
typedef struct {
    int low, high;      // the samples that may be looked at
    int pairs, padded;  // output pixels, up to a multiple of 16
    int fits;           // any four output pixels in a row take their first samples from eight in a row
    int32_t *first;
    int32_t *starts;    // of every four output pixels, where those eight begin
    int32_t *order;     // of each output pixel, the bytes of its two samples among those eight
    int32_t *weights;   // [pairs][padded]: two weights in each
} Taps;

// Two rows of samples, with a weight for each.
typedef struct {
    const uint8_t *rows[2];
    int32_t weights;
} RowPair;

typedef struct {
    // out[x] = the weighted sum of the rows, 7 bits after the point. Up to 15 more than `count` are read and written.
    void (*down)(const RowPair *pairs, int num_pairs, int count, int16_t *out);
    // out[i] = the weighted sum of the samples that the table names, 6 bits after the point.
    void (*along)(const Taps *taps, const int16_t *row, int16_t *out);
    // Y, Cb, Cr with 6 bits after the point to R, G, B. Lines may be read, not written, up to a multiple of 16.
    void (*convert)(const int16_t *const lines[3], int count, uint8_t *const out[3]);
    // The same without a change of colours, of one line.
    void (*round)(const int16_t *line, int count, uint8_t *out);
} Kernels;

// The fastest that this processor has; all give the same bits.
const Kernels *jpeg_kernels(int portable);

#endif
