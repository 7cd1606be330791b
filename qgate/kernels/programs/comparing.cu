// Sums, extremes and counts over pairs of numbers, a column for each tile; see comparing.py.
//
// A warp takes a tile, each lane COLUMNS neighboring columns of it. The order of additions is that
// of `compare_by_torch`: down the columns, then neighbors. Compile without fused multiply-add.
// KIND_A and KIND_R: 0 bf16, 1 fp16, 2 float32. WIDTH: columns of a tile. UNROLL: rows at a time.
#define COLUMNS (WIDTH / 32)
constexpr int rows_at_a_time = UNROLL;

#define EVERY 0xFFFFFFFFu
#define MAGNITUDE 0x7FFFFFFFu
#define INFINITE 0x7F800000u
#define NOTHING 0x7FC00000u

template <int KIND> struct Stored { typedef unsigned short type; };
template <> struct Stored<2> { typedef unsigned type; };
typedef Stored<KIND_A>::type number_a;
typedef Stored<KIND_R>::type number_r;

template <class Number> struct __align__(sizeof(Number) * COLUMNS) Row { Number at[COLUMNS]; };

// Return the float32 bits of a number.
template <int KIND> __device__ __forceinline__ unsigned widen(unsigned bits)
{
    if (KIND == 0)
        return bits << 16;
    if (KIND == 1)
        return half_to_float_bits((unsigned short)bits);
    return bits;
}

// Return float32 as float64: its bits moved into place are 2**-896 of it. A conversion takes four
// times as long as the product. Not for Inf and NaN.
__device__ __forceinline__ double wide(unsigned bits)
{
    const int high = ((int)bits >> 3) & (int)0x8FFFFFFFu;
    return __hiloint2double(high, (int)(bits << 29)) * 0x1p896;
}

__device__ __forceinline__ unsigned larger(unsigned a, unsigned b) { return a > b ? a : b; }

// Load a lane's columns of a row as float32 bits; CHECKED reads them singly, and NaN after the last.
template <bool CHECKED, int KIND, class Number>
__device__ __forceinline__ void load(const Number *x, long long at, long long n, unsigned *bits)
{
    if (CHECKED) {
#pragma unroll
        for (int k = 0; k < COLUMNS; ++k)
            bits[k] = at + k < n ? widen<KIND>(x[at + k]) : NOTHING;
    } else {
        const Row<Number> row = *(const Row<Number> *)(x + at);
#pragma unroll
        for (int k = 0; k < COLUMNS; ++k)
            bits[k] = widen<KIND>(row.at[k]);
    }
}

// Add neighbors, neighbors of those, and so on; every lane gets the sum.
__device__ __forceinline__ double total(const double *columns)
{
    double x[COLUMNS];
#pragma unroll
    for (int k = 0; k < COLUMNS; ++k)
        x[k] = columns[k];
#pragma unroll
    for (int half = COLUMNS / 2; half > 0; half /= 2)
#pragma unroll
        for (int k = 0; k < half; ++k)
            x[k] = x[2 * k] + x[2 * k + 1];
    double sum = x[0];
#pragma unroll 1
    for (int lane = 1; lane < 32; lane *= 2)
        sum += __shfl_xor_sync(EVERY, sum, lane);
    return sum;
}

__device__ __forceinline__ int total(int count)
{
#pragma unroll 1
    for (int lane = 1; lane < 32; lane *= 2)
        count += __shfl_xor_sync(EVERY, count, lane);
    return count;
}

__device__ __forceinline__ double most(double x)
{
#pragma unroll 1
    for (int lane = 1; lane < 32; lane *= 2) {
        const double other = __shfl_xor_sync(EVERY, x, lane);
        x = other > x ? other : x;
    }
    return x;
}

struct Pairs {
    const number_a *a;
    const number_r *r;
    long long begin, n;
};

// Add both sides of a tile. CHECKED leaves out pairs that do not exist or are not finite, and
// counts the others in `pairs`; else `largest` tells whether there are such.
template <bool CHECKED>
__device__ __forceinline__ void add_sides(
    const Pairs &of, double &whole_a, double &whole_r, int &pairs, unsigned &largest)
{
    double sum_a[COLUMNS], sum_r[COLUMNS];
#pragma unroll
    for (int k = 0; k < COLUMNS; ++k)
        sum_a[k] = sum_r[k] = 0.0;
    pairs = 0;
    largest = 0;
#pragma unroll 4
    for (int row = 0; row < TILE; row += WIDTH) {
        unsigned a[COLUMNS], r[COLUMNS];
        const long long at = of.begin + row + threadIdx.x % 32 * COLUMNS;
        load<CHECKED, KIND_A>(of.a, at, of.n, a);
        load<CHECKED, KIND_R>(of.r, at, of.n, r);
#pragma unroll
        for (int k = 0; k < COLUMNS; ++k) {
            const unsigned size = larger(a[k] & MAGNITUDE, r[k] & MAGNITUDE);
            if (CHECKED) {
                const bool good = size < INFINITE;
                a[k] = good ? a[k] : 0;
                r[k] = good ? r[k] : 0;
                pairs += good;
            } else {
                largest = larger(largest, size);
            }
            sum_a[k] += wide(a[k]);
            sum_r[k] += wide(r[k]);
        }
    }
    whole_a = total(sum_a);
    whole_r = total(sum_r);
    pairs = CHECKED ? total(pairs) : TILE;
}

struct Columns {
    double rest_a[COLUMNS], rest_r[COLUMNS], m2_a[COLUMNS], m2_r[COLUMNS], co[COLUMNS];
    double squares[COLUMNS], abs_error[COLUMNS], error[COLUMNS], abs_reference[COLUMNS];
};

// Write what is about the means and the errors of a tile; count keys except for zero's, and return
// how often that occurs in this lane.
template <bool CHECKED>
__device__ __forceinline__ unsigned add_errors(
    const Pairs &of, unsigned *table, int shift, int low, double mean_a, double mean_r,
    double *sums, double *extremes, int *counts, long long tiles)
{
    Columns sum;
#pragma unroll
    for (int k = 0; k < COLUMNS; ++k) {
        sum.rest_a[k] = sum.rest_r[k] = sum.m2_a[k] = sum.m2_r[k] = sum.co[k] = 0.0;
        sum.squares[k] = sum.abs_error[k] = sum.error[k] = sum.abs_reference[k] = 0.0;
    }
    double largest = 0.0;
    const float infinity = __uint_as_float(INFINITE);
    float least_a = infinity, least_r = infinity, most_a = -infinity, most_r = -infinity;
    int flips = 0;
    unsigned zeros = 0;
#pragma unroll rows_at_a_time
    for (int row = 0; row < TILE; row += WIDTH) {
        unsigned bits_a[COLUMNS], bits_r[COLUMNS];
        const long long at = of.begin + row + threadIdx.x % 32 * COLUMNS;
        load<CHECKED, KIND_A>(of.a, at, of.n, bits_a);
        load<CHECKED, KIND_R>(of.r, at, of.n, bits_r);
#pragma unroll
        for (int k = 0; k < COLUMNS; ++k) {
            bool good = true;
            if (CHECKED) {
                good = larger(bits_a[k] & MAGNITUDE, bits_r[k] & MAGNITUDE) < INFINITE;
                bits_a[k] = good ? bits_a[k] : 0;
                bits_r[k] = good ? bits_r[k] : 0;
            }
            const float near_a = __uint_as_float(bits_a[k]), near_r = __uint_as_float(bits_r[k]);
            const double a = wide(bits_a[k]), r = wide(bits_r[k]);
            const double error = a - r, size = fabs(error);
            double off_a = a - mean_a, off_r = r - mean_r;
            if (CHECKED) {
                off_a = good ? off_a : 0.0;
                off_r = good ? off_r : 0.0;
            }
            sum.rest_a[k] += off_a;
            sum.rest_r[k] += off_r;
            sum.m2_a[k] += off_a * off_a;
            sum.m2_r[k] += off_r * off_r;
            sum.co[k] += off_a * off_r;
            sum.squares[k] += error * error;
            sum.abs_error[k] += size;
            sum.error[k] += error;
            sum.abs_reference[k] += fabs(r);
            largest = size > largest ? size : largest;
            if (!CHECKED || good) {
                least_a = fminf(least_a, near_a);
                most_a = fmaxf(most_a, near_a);
                least_r = fminf(least_r, near_r);
                most_r = fmaxf(most_r, near_r);
            }
            flips += (int)(bits_a[k] ^ bits_r[k]) < 0 && near_a != 0.0f && near_r != 0.0f;
            const int key = __double2hiint(size) >> (shift - 32);
            add_one(table, key - low, key != 0);
            zeros += good && key == 0;
        }
    }
    const double rows[9] = {
        total(sum.rest_a), total(sum.rest_r), total(sum.m2_a), total(sum.m2_r), total(sum.co),
        total(sum.squares), total(sum.abs_error), total(sum.error), total(sum.abs_reference)};
    // Without the sign of zero, and the least as the most of the opposites.
    const double ends[5] = {
        most(largest), -most(-(double)least_a), most(most_a), -most(-(double)least_r), most(most_r)};
    flips = total(flips);
    if (threadIdx.x % 32 == 0) {
        for (int i = 0; i < 9; ++i)
            sums[(2 + i) * tiles] = rows[i];
        for (int i = 0; i < 5; ++i)
            extremes[i * tiles] = ends[i] + 0.0;
        counts[tiles] = flips;
    }
    return zeros;
}

// Count NaN, Inf and -Inf on both sides, and pairs whose kinds differ.
__device__ __forceinline__ void count_kinds(const Pairs &of, int *counts, long long tiles)
{
    int found[7] = {0, 0, 0, 0, 0, 0, 0};
    for (int row = threadIdx.x % 32; row < TILE; row += 32) {
        const long long at = of.begin + row;
        if (at >= of.n)
            break;
        const unsigned sides[2] = {widen<KIND_A>(of.a[at]), widen<KIND_R>(of.r[at])};
        int kinds[2];
        for (int side = 0; side < 2; ++side) {
            const unsigned size = sides[side] & MAGNITUDE;
            kinds[side] = size < INFINITE ? 0 : size > INFINITE ? 1 : sides[side] == size ? 2 : 3;
            for (int kind = 1; kind < 4; ++kind)
                found[3 * side + kind - 1] += kinds[side] == kind;
        }
        found[6] += kinds[0] != kinds[1];
    }
    for (int i = 0; i < 7; ++i) {
        const int count = total(found[i]);
        if (threadIdx.x % 32 == 0)
            counts[(2 + i) * tiles] = count;
    }
}

// `keys` has to be zero. A block's keys, those of [low, low + room), are counted in its table.
extern "C" __global__ void __launch_bounds__(THREADS, 1) compare_pairs(
    const number_a *actual, const number_r *reference, double *sums, double *extremes, int *counts,
    count_t *keys, long long n, long long tiles, long long shift, long long low, long long room)
{
    SHARED(unsigned, table);
    for (int i = threadIdx.x; i < room; i += blockDim.x)
        table[i] = 0;
    __syncthreads();

    const int warps = blockDim.x / 32;
    const bool aligned = (size_t)actual % sizeof(Row<number_a>) == 0
        && (size_t)reference % sizeof(Row<number_r>) == 0;
    unsigned zeros = 0;
    for (long long tile = (long long)blockIdx.x * warps + threadIdx.x / 32; tile < tiles;
         tile += (long long)gridDim.x * warps) {
        bool clean = aligned && (tile + 1) * TILE <= n;
        const Pairs of = {actual, reference, tile * TILE, n};
        double whole_a, whole_r;
        int pairs;
        unsigned largest;
        if (clean) {
            add_sides<false>(of, whole_a, whole_r, pairs, largest);
            clean = !__any_sync(EVERY, largest >= INFINITE);
        }
        if (!clean)
            add_sides<true>(of, whole_a, whole_r, pairs, largest);
        const double divisor = pairs > 1 ? pairs : 1;
        const double mean_a = whole_a / divisor, mean_r = whole_r / divisor;
        if (clean)
            zeros += add_errors<false>(of, table, (int)shift, (int)low, mean_a, mean_r,
                                       sums + tile, extremes + tile, counts + tile, tiles);
        else
            zeros += add_errors<true>(of, table, (int)shift, (int)low, mean_a, mean_r,
                                      sums + tile, extremes + tile, counts + tile, tiles);
        if (threadIdx.x % 32 == 0) {
            sums[tile] = whole_a;
            sums[tiles + tile] = whole_r;
            counts[tile] = pairs;
        }
        if (clean) {
            if (threadIdx.x % 32 < 7)
                counts[(2 + threadIdx.x % 32) * tiles + tile] = 0;
        } else {
            count_kinds(of, counts + tile, tiles);
        }
    }
    __syncthreads();

    for (int i = threadIdx.x; i < room; i += blockDim.x) {
        // Blocks begin at different keys, so that they do not wait for each other.
        const int at = (int)((i + blockIdx.x * 256ll) % room);
        if (table[at])
            atomicAdd(keys + low + at, (count_t)table[at]);
    }
    const int none = total((int)zeros);
    if (threadIdx.x % 32 == 0 && none)
        atomicAdd(keys, (count_t)none);
}
