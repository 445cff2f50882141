// Groups of arguments of the registered operators (fastrl/contract.py), and the code that builds
// them from the dispatcher's stack, which has one value for each of their fields.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <type_traits>
#include <vector>

namespace fastrl {

using torch::stable::Tensor;

struct RowArguments {
  Tensor token_ids;
  std::optional<Tensor> mask;
  int64_t ignore_index;
  std::optional<Tensor> temperatures;
  double temperature, logit_scale, logit_softcap;

  auto fields() {
    return std::tie(token_ids, mask, ignore_index, temperatures, temperature, logit_scale,
                    logit_softcap);
  }
};

struct ScalingArguments {
  std::optional<Tensor> temperatures;
  double temperature, logit_scale, logit_softcap;

  auto fields() { return std::tie(temperatures, temperature, logit_scale, logit_softcap); }
};

struct SavedStats {
  Tensor row_max, log_sum, entropy;
  std::optional<Tensor> grad_logprobs, grad_entropy, grad_logsumexp;

  auto fields() {
    return std::tie(row_max, log_sum, entropy, grad_logprobs, grad_entropy, grad_logsumexp);
  }
};

struct LossArguments {
  Tensor advantages, weights;
  std::optional<Tensor> kl_weights, entropy_weights, policy_weights;
  std::optional<Tensor> old_logprobs, ref_logprobs, cu_seqlens;

  auto fields() {
    return std::tie(advantages, weights, kl_weights, entropy_weights, policy_weights, old_logprobs,
                    ref_logprobs, cu_seqlens);
  }
};

struct ObjectiveArguments {
  int64_t surrogate, level, kl_estimator, kl_gradient, kl_level;
  std::vector<double> coefficients;

  auto fields() {
    return std::tie(surrogate, level, kl_estimator, kl_gradient, kl_level, coefficients);
  }
};

struct AggregationArguments {
  int64_t aggregation;
  double normalizer;
  std::optional<Tensor> normalizer_tensor;
  double length_norm;
  bool count_empty;
  int64_t group_size;
  std::optional<Tensor> group_ids;

  auto fields() {
    return std::tie(aggregation, normalizer, normalizer_tensor, length_norm, count_empty,
                    group_size, group_ids);
  }
};

// An argument of an operator: one value of the stack, or the fields of a struct in their order.
template <typename T, typename = void>
struct Argument {
  static constexpr uint64_t kValues = 1;
  static T taken(StableIValue** next) { return torch::stable::detail::to<T>(*(*next)++); }
};
template <typename T>
struct Argument<T, std::void_t<decltype(std::declval<T&>().fields())>> {
  using Fields = decltype(std::declval<T&>().fields());
  static constexpr uint64_t kValues = std::tuple_size_v<Fields>;
  static T taken(StableIValue** next) { return taken(next, static_cast<Fields*>(nullptr)); }

 private:
  template <typename... Field>
  static T taken(StableIValue** next, std::tuple<Field&...>*) {
    return {Argument<Field>::taken(next)...};
  }
};

// The results of an operator: one, a tuple of several, or a list of several tensors.
template <typename T>
void put_results(StableIValue* stack, uint64_t count, const T& result) {
  STD_TORCH_CHECK(count == 1, "the schema has ", count, " results, the operator 1");
  *stack = torch::stable::detail::from(result);
}
inline void put_results(StableIValue* stack, uint64_t count, const std::vector<Tensor>& results) {
  STD_TORCH_CHECK(count == results.size(), "the schema has ", count, " results, the operator ",
                  results.size());
  for (const Tensor& result : results) *stack++ = torch::stable::detail::from(result);
}
template <typename... T>
void put_results(StableIValue* stack, uint64_t count, const std::tuple<T...>& results) {
  STD_TORCH_CHECK(count == sizeof...(T), "the schema has ", count, " results, the operator ",
                  sizeof...(T));
  std::apply([&](const T&... each) { ((*stack++ = torch::stable::detail::from(each)), ...); },
             results);
}

// boxed<f> is the function f in the form that `impl` of a library takes.
template <auto run>
struct Boxed;
template <typename Result, typename... Parameters, Result (*run)(Parameters...)>
struct Boxed<run> {
  static void call(StableIValue* stack, uint64_t arguments, uint64_t results) {
    constexpr uint64_t kValues = (Argument<std::decay_t<Parameters>>::kValues + ... + 0);
    STD_TORCH_CHECK(arguments == kValues, "the schema has ", arguments, " arguments, the operator ",
                    kValues);
    StableIValue* next = stack;
    // in braces the arguments are taken in order
    std::tuple<std::decay_t<Parameters>...> in{Argument<std::decay_t<Parameters>>::taken(&next)...};
    if constexpr (std::is_void_v<Result>) {
      std::apply(run, in);
    } else {
      put_results(stack, results, std::apply(run, in));
    }
  }
};
template <auto run>
inline constexpr auto boxed = &Boxed<run>::call;

}  // namespace fastrl
