// Products of a vector with some rows of a matrix. Included by isa.h only, inside the namespace of
// one instruction set.

FASTRL_INLINE vfloat load_row(const float* x) {
  vfloat y;
  __builtin_memcpy(&y, x, kVecBytes);
  return y;
}
FASTRL_INLINE vfloat load_row(const BFloat16* x) {
  vhalfwords words;
  __builtin_memcpy(&words, x, kVecBytes / 2);
  return float_of(__builtin_convertvector(words, vuint) << 16);
}
FASTRL_INLINE vfloat load_row(const Half* x) { return load_half(x); }

// Fewer elements than a vector, filled up with zeros.
template <typename T>
FASTRL_INLINE vfloat load_part(const T* x, int64_t count) {
  T part[kLanes] = {};
  __builtin_memcpy(part, x, count * sizeof(T));
  return load_row(part);
}

// out[k] += x . rows[ids[k]], except for ids below 0.
template <typename T>
void gathered_dots(const float* x, const void* rows, int64_t stride, const int32_t* ids,
                   int64_t count, int64_t width, float* out) {
  const int64_t whole = width / kLanes * kLanes, rest = width - whole;
  for (int64_t k = 0; k < count; ++k) {
    if (ids[k] < 0) continue;
    const T* row = static_cast<const T*>(rows) + ids[k] * stride;
    vfloat a{}, b{}, c{}, d{};
    int64_t h = 0;
    for (; h + 4 * kLanes <= whole; h += 4 * kLanes) {
      a += load_row(x + h) * load_row(row + h);
      b += load_row(x + h + kLanes) * load_row(row + h + kLanes);
      c += load_row(x + h + 2 * kLanes) * load_row(row + h + 2 * kLanes);
      d += load_row(x + h + 3 * kLanes) * load_row(row + h + 3 * kLanes);
    }
    for (; h < whole; h += kLanes) a += load_row(x + h) * load_row(row + h);
    if (rest) b += load_part(x + whole, rest) * load_part(row + whole, rest);
    out[k] += static_cast<float>(sum_of_lanes((a + b) + (c + d)));
  }
}

// out += sum_k factors[k] rows[ids[k]] in the order of k, except for ids below 0.
template <typename T>
void gathered_sum(const float* factors, const void* rows, int64_t stride, const int32_t* ids,
                  int64_t count, int64_t width, float* out) {
  const T* const first = static_cast<const T*>(rows);
  const int64_t whole = width / kLanes * kLanes, rest = width - whole;
  int64_t k = 0;
  while (k < count) {
    // four rows for each load and store of the sum
    const T* row[4] = {first, first, first, first};
    float factor[4] = {};
    int64_t taken = 0;
    for (; k < count && taken < 4; ++k) {
      if (ids[k] < 0) continue;
      row[taken] = first + ids[k] * stride;
      factor[taken++] = factors[k];
    }
    if (taken == 4) {
      for (int64_t h = 0; h < whole; h += kLanes) {
        vfloat sum = load_row(out + h);
        for (int j = 0; j < 4; ++j) sum += factor[j] * load_row(row[j] + h);
        __builtin_memcpy(out + h, &sum, kVecBytes);
      }
    } else {
      for (int64_t j = 0; j < taken; ++j) {
        for (int64_t h = 0; h < whole; h += kLanes) {
          const vfloat sum = load_row(out + h) + factor[j] * load_row(row[j] + h);
          __builtin_memcpy(out + h, &sum, kVecBytes);
        }
      }
    }
    if (rest) {
      vfloat sum = load_part(out + whole, rest);
      for (int64_t j = 0; j < taken; ++j) sum += factor[j] * load_part(row[j] + whole, rest);
      __builtin_memcpy(out + whole, &sum, rest * sizeof(float));
    }
  }
}
