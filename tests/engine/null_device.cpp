// A device that does nothing: tensors have shapes and addresses and no memory, kernels return at once What is left is Python, torch's dispatcher and the allocator: host time.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/native/TensorFactories.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <atomic>

using at::Tensor; using c10::IntArrayRef; using std::optional;
static int64_t launches = 0, uploads = 0, downloads = 0, allocations = 0;
static void launch(int count = 1) { launches += count; }

struct NullAllocator final : c10::Allocator {
  static std::atomic<uintptr_t> next;
  c10::DataPtr allocate(size_t bytes) override {
    allocations++;
    auto place = reinterpret_cast<void*>(next.fetch_add((bytes + 511) / 512 * 512 + 512));
    return {place, place, [](void*) {}, c10::Device(c10::DeviceType::PrivateUse1, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return [](void*) {}; }
  void copy_data(void*, const void*, std::size_t) const override {}
};
std::atomic<uintptr_t> NullAllocator::next{0x100000000000};
static NullAllocator allocator;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &allocator);
C10_REGISTER_GUARD_IMPL(PrivateUse1, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::PrivateUse1>);

static constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);
static Tensor made(IntArrayRef size, at::ScalarType dtype) {
  return at::detail::empty_generic(size, &allocator, KEYS, dtype, std::nullopt);
}
static Tensor empty_memory_format(IntArrayRef size, optional<at::ScalarType> dtype, optional<at::Layout>, optional<at::Device>, optional<bool>, optional<at::MemoryFormat> f) {
  return at::detail::empty_generic(size, &allocator, KEYS, c10::dtype_or_default(dtype), f);
}
static Tensor empty_strided(IntArrayRef size, IntArrayRef stride, optional<at::ScalarType> dtype, optional<at::Layout>, optional<at::Device>, optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator, KEYS, c10::dtype_or_default(dtype));
}
static Tensor as_strided(const Tensor& self, IntArrayRef size, IntArrayRef stride, optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
static Tensor view(const Tensor& self, IntArrayRef size) { return at::native::view(self, size); }
static Tensor reshape_alias(const Tensor& self, IntArrayRef size, IntArrayRef stride) { return at::native::_reshape_alias(self, size, stride); }
static Tensor copy_from(const Tensor& self, const Tensor& dst, bool) {
  bool from = self.device().is_privateuseone(), to = dst.device().is_privateuseone();
  if (from && to) launch();
  else if (to) { uploads++; }
  else { downloads++; const_cast<Tensor&>(dst).zero_(); }
  return dst;
}
static Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) { return copy_from(self, dst, false); }
static Tensor mm(const Tensor& a, const Tensor& b) { launch(); return made({a.size(0), b.size(1)}, a.scalar_type()); }
static Tensor addmm(const Tensor&, const Tensor& a, const Tensor& b, const at::Scalar&, const at::Scalar&) { launch(); return made({a.size(0), b.size(1)}, a.scalar_type()); }
static Tensor embedding(const Tensor& w, const Tensor& i, c10::SymInt, bool, bool) { launch(); auto s = i.sizes().vec(); s.push_back(w.size(1)); return made(s, w.scalar_type()); }
static Tensor index_tensor(const Tensor& self, const c10::List<optional<Tensor>>& list) {
  launch();
  optional<Tensor> first = list.get(0); std::vector<int64_t> s;
  if (list.size() == 1 || !optional<Tensor>(list.get(1)).has_value()) { s = first->sizes().vec(); for (int64_t d = 1; d < self.dim(); d++) s.push_back(self.size(d)); }
  else { s = first->sizes().vec(); for (int64_t d = list.size(); d < self.dim(); d++) s.push_back(self.size(d)); }
  return made(s, self.scalar_type());
}
static Tensor& index_put(Tensor& self, const c10::List<optional<Tensor>>&, const Tensor&, bool, bool) { launch(); return self; }
static Tensor binary(const Tensor& a, const Tensor& b) {
  launch();
  if (a.sizes() == b.sizes() || b.dim() == 0) return made(a.sizes(), a.scalar_type());
  return made(at::infer_size(a.sizes(), b.sizes()), a.scalar_type());
}
static Tensor mul(const Tensor& a, const Tensor& b) { return binary(a, b); }
static Tensor div_tensor(const Tensor& a, const Tensor& b) { return binary(a, b); }
static Tensor sub(const Tensor& a, const Tensor& b, const at::Scalar&) { return binary(a, b); }
static Tensor& addcmul_out(const Tensor&, const Tensor&, const Tensor&, const at::Scalar&, Tensor& out) { launch(); return out; }
static Tensor& add_(Tensor& a, const Tensor&, const at::Scalar&) { launch(); return a; }
static Tensor roll(const Tensor& x, c10::SymIntArrayRef, IntArrayRef) { launch(x.is_contiguous() ? 1 : 2); return made(x.sizes(), x.scalar_type()); }
static Tensor silu(const Tensor& x) { launch(); return made(x.sizes(), x.scalar_type()); }
static Tensor sum(const Tensor& x, at::OptionalIntArrayRef, bool, optional<at::ScalarType>) { launch(); return made({x.size(0)}, x.scalar_type()); }
static Tensor softmax(const Tensor& x, int64_t, bool) { launch(); return made(x.sizes(), x.scalar_type()); }
static Tensor argmax(const Tensor& x, optional<int64_t>, bool) { launch(); return made({x.size(0)}, at::kLong); }
static Tensor gather(const Tensor& x, int64_t, const Tensor& i, bool) { launch(); return made(i.sizes(), x.scalar_type()); }
static Tensor cat(const at::ITensorListRef& l, int64_t dim) {
  launch(); std::vector<int64_t> s; at::ScalarType t = at::kFloat; int64_t n = 0;
  for (const auto& x : l) { if (x.dim() == 1 && x.numel() == 0) continue; s = x.sizes().vec(); t = x.scalar_type(); n += x.size(dim < 0 ? dim + x.dim() : dim); }
  if (s.empty()) return made({0}, t);
  s[dim < 0 ? dim + s.size() : dim] = n; return made(s, t);
}
static Tensor& zero_(Tensor& x) { launch(); return x; }
static Tensor& fill_(Tensor& x, const at::Scalar&) { launch(); return x; }
static Tensor& index_add_(Tensor& x, int64_t, const Tensor&, const Tensor&, const at::Scalar&) { launch(); return x; }
static Tensor& index_copy_(Tensor& x, int64_t, const Tensor&, const Tensor&) { launch(); return x; }
static Tensor lt(const Tensor& a, const Tensor& b) { launch(); return made(at::infer_size(a.sizes(), b.sizes()), at::kBool); }
static Tensor bitwise_not(const Tensor& a) { launch(); return made(a.sizes(), a.scalar_type()); }
static Tensor& masked_fill_(Tensor& a, const Tensor&, const at::Scalar&) { launch(); return a; }
static Tensor add_tensor(const Tensor& a, const Tensor& b, const at::Scalar&) { return binary(a, b); }
static Tensor repeat(const Tensor& x, c10::SymIntArrayRef r) { launch(); auto s = x.sizes().vec(); for (size_t i = 0; i < s.size(); i++) s[i] *= r[i].expect_int(); return made(s, x.scalar_type()); }
static Tensor rms_norm(const Tensor& x, c10::SymIntArrayRef, const optional<Tensor>&, optional<double>) { launch(); return made(x.sizes(), x.scalar_type()); }
static std::tuple<Tensor, Tensor, Tensor, Tensor> attention(const Tensor& q, const Tensor&, const Tensor&, const optional<Tensor>&, bool, double, bool, optional<double>) {
  launch();
  auto mixed = made({q.size(0), q.size(2), q.size(1), q.size(3)}, q.scalar_type()).transpose(1, 2);
  return {mixed, made({q.size(0), q.size(1), 0}, at::kFloat), made({}, at::kLong), made({}, at::kLong)};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_memory_format); m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided); m.impl("view", view); m.impl("_reshape_alias", reshape_alias);
  m.impl("_copy_from", copy_from); m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("mm", mm); m.impl("addmm", addmm); m.impl("embedding", embedding); m.impl("index.Tensor", index_tensor);
  m.impl("_index_put_impl_", index_put); m.impl("mul.Tensor", mul); m.impl("div.Tensor", div_tensor); m.impl("sub.Tensor", sub);
  m.impl("addcmul.out", addcmul_out); m.impl("add_.Tensor", add_); m.impl("roll", roll); m.impl("silu", silu);
  m.impl("sum.dim_IntList", sum); m.impl("_softmax", softmax); m.impl("argmax", argmax); m.impl("gather", gather);
  m.impl("cat", cat); m.impl("zero_", zero_); m.impl("fill_.Scalar", fill_); m.impl("index_add_", index_add_); m.impl("repeat", repeat); m.impl("index_copy_", index_copy_); m.impl("lt.Tensor", lt); m.impl("bitwise_not", bitwise_not); m.impl("masked_fill_.Scalar", masked_fill_); m.impl("add.Tensor", add_tensor);
  m.impl("rms_norm", rms_norm); m.impl("_scaled_dot_product_efficient_attention", attention);
}
extern "C" void counts(int64_t* to) { to[0] = launches; to[1] = uploads; to[2] = downloads; to[3] = allocations; }
