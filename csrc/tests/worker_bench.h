// An update worker on the host with a few layers, and what a serial loop makes of the same steps.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "hytrain/adam.h"
#include "hytrain/device.h"
#include "hytrain/update_worker.h"

namespace hytrain::testing {

// ThreadSanitizer knows nothing of how libgomp's threads wait for each other, and would take the
// work of one team for races. So under it a pass is one thread; the worker, the lanes and the
// callers, whose ordering is the subject, are threads of the standard library.
#ifdef __SANITIZE_THREAD__
constexpr bool kOneThreadPasses = true;
#else
constexpr bool kOneThreadPasses = false;
#endif

inline void check(bool condition, const std::string& what) {
    if (!condition) {
        std::fprintf(stderr, "FAILED: %s\n", what.c_str());
        std::fflush(stderr);
        std::_Exit(1);  // other threads are running
    }
}

// Of n parameters: fp32 master weights, or, where they are split, their remainders.
struct State {
    explicit State(std::size_t n, bool is_split = false)
        : p(is_split ? 0 : n), m(n), v(n), remainders(is_split ? n : 0), split(is_split) {}
    StateArrays arrays() {
        StateArrays arrays{weights(), m.data(), v.data()};
        arrays.split = split;
        return arrays;
    }
    void* weights() { return split ? static_cast<void*>(remainders.data()) : p.data(); }
    std::size_t weight_bytes() const { return m.size() * (split ? 2 : sizeof(float)); }
    bool operator==(const State& other) const {
        const auto same = [](const auto& a, const auto& b) {
            return a.size() == b.size() &&
                   (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0);
        };
        return same(p, other.p) && same(m, other.m) && same(v, other.v) &&
               same(remainders, other.remainders);
    }
    std::vector<float> p, m, v;
    std::vector<std::uint16_t> remainders;
    bool split;
};

// The state with its master weights, all of them finite, split; `copy` becomes their upper halves.
inline State split_state(const State& whole, std::vector<char>& copy) {
    State result(whole.m.size(), true);
    result.m = whole.m;
    result.v = whole.v;
    copy.resize(2 * whole.p.size());
    for (std::size_t i = 0; i < whole.p.size(); ++i) {
        std::uint32_t bits = 0;
        std::memcpy(&bits, &whole.p[i], sizeof(bits));
        const auto upper = static_cast<std::uint16_t>((bits + 0x8000U) >> 16U);
        std::memcpy(copy.data() + 2 * i, &upper, sizeof(upper));
        result.remainders[i] = static_cast<std::uint16_t>(bits + 0x8000U);
    }
    return result;
}

// Sizes of a layer; everything in elements.
struct Shape {
    std::size_t n = 0;
    std::size_t chunk = 0;
    DType gradient = DType::kBFloat16;
    DType weights = DType::kBFloat16;
    bool weights_on_host = false;
    bool split = false;          // master weights; the training copy is in bf16 then
    bool whole_on_host = false;  // nevertheless: those on the "device" alone are
};

// A layer as its owner sees it, and the serial loop's twin.
struct BenchLayer {
    BenchLayer(int number, const Shape& its, std::mt19937_64& random)
        : index(number), shape(its), expected(its.n), weights(its.n * size_of(its.weights)) {
        std::normal_distribution<float> normal;
        for (float& value : expected.p) value = normal(random);
        weights = expected_weights();
        state = std::make_unique<State>(expected_state());
    }

    std::size_t gradient_bytes() const { return shape.n * size_of(shape.gradient); }

    bool is_split(bool on_device) const {
        return shape.split && (on_device || !shape.whole_on_host);
    }

    std::vector<char> expected_weights() const {
        std::vector<char> cast(shape.n * size_of(shape.weights));
        if (shape.split) {
            split_state(expected, cast);
            return cast;
        }
        adam_publish(expected.p.data(), shape.n, Outgoing{cast.data(), shape.weights, false}, 1);
        return cast;
    }

    State expected_state() const {
        std::vector<char> copy;
        return is_split(away) ? split_state(expected, copy) : expected;
    }

    // The step of the gradient sent last, as the serial loop makes it.
    void make_expected_step(float scale, const AdamHyper& hyper) {
        const GradientStep step{sent.data(), shape.gradient, scale, hyper};
        adam_commit(expected.p.data(), expected.m.data(), expected.v.data(), shape.n, step,
                    Outgoing{}, 1);
    }

    std::string name() const { return "layer " + std::to_string(index); }

    int index;
    Shape shape;
    std::unique_ptr<State> state;  // where it is now
    State expected;                // whole, also where master weights are split
    std::vector<char> weights;     // the training copy, on the "device"
    std::vector<char> gradient;    // likewise; what the worker fetches
    std::vector<char> sent;        // the same values, never touched by the worker
    std::vector<char> scratch;
    double sum_of_squares = 0.0;
    EventHandle ready = kNoEvent;  // of the gradient
    EventHandle free = kNoEvent;   // recorded after all earlier uses of a destination
    EventHandle moved = kNoEvent;
    bool away = false;
};

// Small numbers of either sign as bits of any of the three types.
inline std::vector<char> random_gradient(std::size_t n, DType dtype, std::mt19937_64& random) {
    std::vector<char> bytes(n * size_of(dtype));
    for (std::size_t i = 0; i < n; ++i) {
        const auto draw = static_cast<std::uint32_t>(random());
        if (dtype == DType::kFloat32) {
            const float value = static_cast<float>(static_cast<std::int32_t>(draw)) / 2147483648.0F;
            std::memcpy(bytes.data() + 4 * i, &value, 4);
        } else {
            const std::uint32_t sign = draw & 0x8000U;
            const auto bits = static_cast<std::uint16_t>(sign | (0x3000U + draw % 0x0800U));
            std::memcpy(bytes.data() + 2 * i, &bits, 2);
        }
    }
    return bytes;
}

// The worker with its layers and its pinned memory. The device stays accessible, for events and
// copies of the tests' own, which stand for what compute does there.
class WorkerBench {
   public:
    WorkerBench(std::unique_ptr<Device> device, const std::vector<Shape>& shapes, int num_threads,
                std::uint64_t seed, unsigned max_delay_us, std::size_t spare_slots,
                const std::function<void(UpdateWorker&)>& before_start = nullptr)
        : random_(seed),
          device_(device.get()),
          worker_(
              std::make_unique<UpdateWorker>(std::move(device), num_threads, seed, max_delay_us)) {
        for (std::size_t i = 0; i < shapes.size(); ++i) {
            layers_.emplace_back(static_cast<int>(i), shapes[i], random_);
        }
        for (BenchLayer& layer : layers_) add(layer, spare_slots);
        std::size_t most = 0;
        for (const Shape& shape : shapes) most = std::max(most, shape.chunk);
        // One is as few as the worker can do with.
        add_slots(UpdateWorker::kOutgoing, most * sizeof(float),
                  1 + static_cast<int>((seed + 1) % 3));
        if (before_start) before_start(*worker_);
        worker_->start();
    }

    ~WorkerBench() {
        worker_->close();  // the lanes are idle from here on
        for (EventHandle event : events_) device_->destroy_event(event);
    }
    WorkerBench(const WorkerBench&) = delete;
    WorkerBench& operator=(const WorkerBench&) = delete;

    UpdateWorker& worker() { return *worker_; }
    Device& device() { return *device_; }
    std::deque<BenchLayer>& layers() { return layers_; }
    BenchLayer& layer(int index) { return layers_[static_cast<std::size_t>(index)]; }
    std::mt19937_64& random() { return random_; }

    // More memory of a class, or for what goes out, while the worker runs.
    void add_slots(int slot_class, std::size_t bytes, int count) {
        pinned_.emplace_back(bytes * static_cast<std::size_t>(count));
        worker_->add_slots(slot_class, pinned_.back().data(), bytes, count);
    }

    StepRecord record(float scale, const AdamHyper& hyper) const { return {scale, {hyper}}; }

    // A new random gradient; it is there when compute, here a lane, has made it.
    void make_gradient(BenchLayer& layer) {
        wait(layer.ready);
        layer.sent = random_gradient(layer.shape.n, layer.shape.gradient, random_);
        layer.gradient.resize(layer.sent.size());
        layer.sum_of_squares =
            sum_of_squares(layer.sent.data(), layer.shape.gradient, layer.shape.n, 1);
        device_->copy(Lane::kToDevice, layer.gradient.data(), layer.sent.data(), layer.sent.size());
        device_->record(layer.ready, Lane::kToDevice);
    }

    void send(BenchLayer& layer, const StepRecord& record, bool direct) {
        Job job;
        job.pass = direct ? Pass::kDirect : Pass::kUpdate;
        job.layer = layer.index;
        job.gradient = layer.gradient.data();
        job.gradient_ready = layer.ready;
        job.sum_of_squares = &layer.sum_of_squares;
        job.record = record;
        worker_->submit(std::move(job));
    }

    void submit(BenchLayer& layer, Pass pass) {
        Job job;
        job.pass = pass;
        job.layer = layer.index;
        worker_->submit(std::move(job));
    }

    // Sends a layer's state to the "device" or back; returns the state that it leaves behind, which
    // must live until the layer is not moving.
    std::unique_ptr<State> move(BenchLayer& layer, EventHandle moved) {
        std::unique_ptr<State> old = std::move(layer.state);
        layer.state = std::make_unique<State>(layer.shape.n, layer.is_split(!layer.away));
        char* const from = static_cast<char*>(old->weights());
        Job job;
        job.layer = layer.index;
        job.gradient_ready = layer.free;
        if (layer.away) {
            // The last update on the device may not have been made yet.
            const std::size_t bytes = old->weight_bytes();
            layer.scratch.assign(from, from + bytes);
            device_->copy(Lane::kToDevice, from, layer.scratch.data(), bytes);
            device_->record(layer.free, Lane::kToDevice);
            job.pass = Pass::kArrive;
            job.host_state = layer.state->arrays();
            job.device_state = old->arrays();
        } else {
            // An earlier user of the destination may still write there.
            const std::size_t bytes = layer.state->weight_bytes();
            layer.scratch.assign(bytes, 0x55);
            device_->copy(Lane::kToHost, layer.state->weights(), layer.scratch.data(), bytes);
            device_->record(layer.free, Lane::kToHost);
            job.pass = Pass::kLeave;
            job.device_state = layer.state->arrays();
            job.moved = moved;
        }
        layer.away = !layer.away;
        worker_->submit_move(std::move(job));
        return old;
    }

    void check_weights(const BenchLayer& layer) const {
        check(layer.weights == layer.expected_weights(), layer.name() + ": other weights");
    }

    void check_state(const BenchLayer& layer) const {
        check(*layer.state == layer.expected_state(), layer.name() + ": another state");
    }

    void wait(EventHandle event) {
        while (!device_->is_complete(event)) std::this_thread::yield();
    }

    EventHandle new_event() {
        events_.push_back(device_->create_event(true));
        return events_.back();
    }

   private:
    void add(BenchLayer& layer, std::size_t spare_slots) {
        layer.ready = new_event();
        layer.free = new_event();
        layer.moved = new_event();
        const Shape& shape = layer.shape;
        const std::size_t slot_bytes = shape.chunk * size_of(shape.gradient);
        // A class of each layer's own: as many as it keeps pending, and a few that take new ones.
        const int slots = worker_->add_slot_class(slot_bytes);
        std::vector<Chunk> chunks;
        for (std::size_t at = 0; at < shape.n; at += shape.chunk) {
            Chunk chunk;
            chunk.n = std::min(shape.chunk, shape.n - at);
            chunk.shard_offset = at;
            chunk.weights = layer.weights.data() + at * size_of(shape.weights);
            chunk.weights_on_host = shape.weights_on_host;
            chunk.weights_dtype = shape.split ? DType::kBFloat16Away : shape.weights;
            chunk.slot_class = slots;
            chunks.push_back(chunk);
        }
        const auto count = static_cast<int>(chunks.size() + spare_slots);
        norms_.push_back(0.0);
        worker_->add_layer(layer.name(), shape.gradient, kNoEvent, &norms_.back(),
                           layer.state->arrays(), std::move(chunks));
        add_slots(slots, slot_bytes, count);
    }

    std::mt19937_64 random_;
    Device* device_;
    std::deque<BenchLayer> layers_;  // addresses stay
    std::deque<std::vector<char>> pinned_;
    std::deque<double> norms_;
    std::vector<EventHandle> events_;
    std::unique_ptr<UpdateWorker> worker_;  // last: it ends before what it works on
};

}  // namespace hytrain::testing
