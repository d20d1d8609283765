// The loops of resizing, in plain C and with AVX2. Everything is in integers: both give the same bits.

#include <string.h>

#include "jpeg_kernels.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_AVX2 1
#include <immintrin.h>
#endif

// YCbCr to RGB, in 32,768ths; the chroma is doubled first.
enum { RED_OF_CR = 22970, GREEN_OF_CB = 5638, GREEN_OF_CR = 11700, BLUE_OF_CB = 29032, MIDDLE = 128 << FRACTION_BITS };

static int low_half(int32_t pair) { return (int16_t)(pair & 0xFFFF); }
static int high_half(int32_t pair) { return pair >> 16; }

static void down_portable(const RowPair *pairs, int num_pairs, int count, int16_t *out) {
    for (int x = 0; x < count; x++) {
        int32_t sum = 1 << (DOWN_SHIFT - 1);
        for (int j = 0; j < num_pairs; j++)
            sum += pairs[j].rows[0][x] * low_half(pairs[j].weights) + pairs[j].rows[1][x] * high_half(pairs[j].weights);
        out[x] = (int16_t)(sum >> DOWN_SHIFT);
    }
}

static void along_portable(const Taps *taps, const int16_t *row, int16_t *out) {
    for (int i = 0; i < taps->padded; i++) {
        int32_t sum = 1 << (ALONG_SHIFT - 1);
        const int16_t *from = row + taps->first[i];
        for (int j = 0; j < taps->pairs; j++) {
            int32_t weights = taps->weights[j * taps->padded + i];
            sum += from[2 * j] * low_half(weights) + from[2 * j + 1] * high_half(weights);
        }
        out[i] = (int16_t)(sum >> ALONG_SHIFT);
    }
}

static inline int times(int a, int b) { return (a * b + (1 << 14)) >> 15; }

static inline uint8_t to_byte(int value) {
    int rounded = (value + (1 << (FRACTION_BITS - 1))) >> FRACTION_BITS;
    return (uint8_t)(rounded < 0 ? 0 : rounded > 255 ? 255 : rounded);
}

static void convert_portable(const int16_t *const lines[3], int count, uint8_t *const out[3]) {
    for (int i = 0; i < count; i++) {
        int luma = lines[0][i], cb = (lines[1][i] - MIDDLE) * 2, cr = (lines[2][i] - MIDDLE) * 2;
        out[0][i] = to_byte(luma + times(cr, RED_OF_CR));
        out[1][i] = to_byte(luma - times(cb, GREEN_OF_CB) - times(cr, GREEN_OF_CR));
        out[2][i] = to_byte(luma + times(cb, BLUE_OF_CB));
    }
}

static void round_portable(const int16_t *line, int count, uint8_t *out) {
    for (int i = 0; i < count; i++) out[i] = to_byte(line[i]);
}

#ifdef HAS_AVX2
#define FOR_AVX2 __attribute__((target("avx2")))

FOR_AVX2 static void down_avx2(const RowPair *pairs, int num_pairs, int count, int16_t *out) {
    for (int x = 0; x < count; x += 16) {
        __m256i left = _mm256_set1_epi32(1 << (DOWN_SHIFT - 1)), right = left;
        for (int j = 0; j < num_pairs; j++) {
            __m128i a = _mm_loadu_si128((const __m128i *)(pairs[j].rows[0] + x));
            __m128i b = _mm_loadu_si128((const __m128i *)(pairs[j].rows[1] + x));
            __m256i weights = _mm256_set1_epi32(pairs[j].weights);
            __m256i low = _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(a, b));
            __m256i high = _mm256_cvtepu8_epi16(_mm_unpackhi_epi8(a, b));
            left = _mm256_add_epi32(left, _mm256_madd_epi16(low, weights));
            right = _mm256_add_epi32(right, _mm256_madd_epi16(high, weights));
        }
        left = _mm256_srai_epi32(left, DOWN_SHIFT), right = _mm256_srai_epi32(right, DOWN_SHIFT);
        __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi32(left, right), 0xD8);
        _mm256_storeu_si256((__m256i *)(out + x), both);
    }
}

// The samples of output pixels i to i + 7, pair j of each: eight in a row for each four, put in order.
FOR_AVX2 static inline __m256i ordered(const Taps *taps, const int16_t *row, int i, int j) {
    const int32_t *starts = taps->starts + i / 4;
    __m256i eights = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(row + starts[0] + 2 * j)));
    eights = _mm256_inserti128_si256(eights, _mm_loadu_si128((const __m128i *)(row + starts[1] + 2 * j)), 1);
    return _mm256_shuffle_epi8(eights, _mm256_loadu_si256((const __m256i *)(taps->order + i)));
}

// The same where they lie farther apart, as of an image that shrinks to less than half.
FOR_AVX2 static inline __m256i gathered(const Taps *taps, const int16_t *row, int i, int j) {
    int32_t pairs[8];
    for (int k = 0; k < 8; k++) memcpy(&pairs[k], row + taps->first[i + k] + 2 * j, sizeof pairs[k]);
    return _mm256_loadu_si256((const __m256i *)pairs);
}

#define ALONG(NAME, SAMPLES)                                                                                    \
    FOR_AVX2 static void NAME(const Taps *taps, const int16_t *row, int16_t *out) {                             \
        for (int i = 0; i < taps->padded; i += 8) {                                                             \
            __m256i sum = _mm256_set1_epi32(1 << (ALONG_SHIFT - 1));                                            \
            for (int j = 0; j < taps->pairs; j++) {                                                             \
                __m256i weights = _mm256_loadu_si256((const __m256i *)(taps->weights + j * taps->padded + i));  \
                sum = _mm256_add_epi32(sum, _mm256_madd_epi16(SAMPLES(taps, row, i, j), weights));              \
            }                                                                                                   \
            sum = _mm256_srai_epi32(sum, ALONG_SHIFT);                                                          \
            __m128i half = _mm256_extracti128_si256(sum, 1);                                                    \
            _mm_storeu_si128((__m128i *)(out + i), _mm_packs_epi32(_mm256_castsi256_si128(sum), half));         \
        }                                                                                                       \
    }

ALONG(along_near_avx2, ordered)
ALONG(along_far_avx2, gathered)

FOR_AVX2 static void along_avx2(const Taps *taps, const int16_t *row, int16_t *out) {
    if (taps->fits) along_near_avx2(taps, row, out);
    else along_far_avx2(taps, row, out);
}

// Rounds sixteen values to bytes, and writes the first `count` of them.
FOR_AVX2 static inline void put_bytes(__m256i values, int count, uint8_t *out) {
    __m256i half = _mm256_set1_epi16(1 << (FRACTION_BITS - 1));
    __m256i rounded = _mm256_srai_epi16(_mm256_add_epi16(values, half), FRACTION_BITS);
    __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
    uint8_t tail[16];
    _mm_storeu_si128((__m128i *)(count >= 16 ? out : tail), bytes);
    if (count < 16) memcpy(out, tail, (size_t)count);
}

FOR_AVX2 static inline __m256i chroma_at(const int16_t *line) {
    __m256i values = _mm256_sub_epi16(_mm256_loadu_si256((const __m256i *)line), _mm256_set1_epi16(MIDDLE));
    return _mm256_add_epi16(values, values);
}

FOR_AVX2 static void convert_avx2(const int16_t *const lines[3], int count, uint8_t *const out[3]) {
    for (int i = 0; i < count; i += 16) {
        __m256i luma = _mm256_loadu_si256((const __m256i *)(lines[0] + i));
        __m256i cb = chroma_at(lines[1] + i), cr = chroma_at(lines[2] + i);
        __m256i green = _mm256_sub_epi16(luma, _mm256_mulhrs_epi16(cb, _mm256_set1_epi16(GREEN_OF_CB)));
        green = _mm256_sub_epi16(green, _mm256_mulhrs_epi16(cr, _mm256_set1_epi16(GREEN_OF_CR)));
        __m256i red = _mm256_add_epi16(luma, _mm256_mulhrs_epi16(cr, _mm256_set1_epi16(RED_OF_CR)));
        __m256i blue = _mm256_add_epi16(luma, _mm256_mulhrs_epi16(cb, _mm256_set1_epi16(BLUE_OF_CB)));
        put_bytes(red, count - i, out[0] + i);
        put_bytes(green, count - i, out[1] + i);
        put_bytes(blue, count - i, out[2] + i);
    }
}

FOR_AVX2 static void round_avx2(const int16_t *line, int count, uint8_t *out) {
    for (int i = 0; i < count; i += 16) put_bytes(_mm256_loadu_si256((const __m256i *)(line + i)), count - i, out + i);
}

static const Kernels with_avx2 = {down_avx2, along_avx2, convert_avx2, round_avx2};
#endif

static const Kernels portable_kernels = {down_portable, along_portable, convert_portable, round_portable};

const Kernels *jpeg_kernels(int portable) {
#ifdef HAS_AVX2
    if (!portable && __builtin_cpu_supports("avx2")) return &with_avx2;
#endif
    (void)portable;
    return &portable_kernels;
}
