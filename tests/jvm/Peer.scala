package ags.peers

import java.io.{BufferedReader, InputStreamReader, PrintStream}

import scala.jdk.CollectionConverters._
import scala.util.Using

import com.fasterxml.jackson.databind.{JsonNode, ObjectMapper}
import com.fasterxml.jackson.databind.node.ObjectNode
import org.apache.hadoop.conf.Configuration
import org.apache.hadoop.fs.Path
import org.apache.parquet.HadoopReadOptions
import org.apache.parquet.column.ParquetProperties.WriterVersion
import org.apache.parquet.crypto.{
  DecryptionPropertiesFactory,
  EncryptionPropertiesFactory,
  FileDecryptionProperties,
  FileEncryptionProperties
}
import org.apache.parquet.example.data.Group
import org.apache.parquet.filter2.compat.FilterCompat
import org.apache.parquet.filter2.predicate.{FilterApi, FilterPredicate}
import org.apache.parquet.filter2.predicate.Operators.{Column, SupportsLtGt}
import org.apache.parquet.hadoop.{ParquetFileReader, ParquetReader, ParquetWriter}
import org.apache.parquet.hadoop.ParquetFileWriter.Mode
import org.apache.parquet.hadoop.api.WriteSupport.WriteContext
import org.apache.parquet.hadoop.example.{ExampleParquetWriter, GroupReadSupport}
import org.apache.parquet.hadoop.metadata.{ColumnPath, CompressionCodecName, FileMetaData}
import org.apache.parquet.hadoop.rewrite.{ParquetRewriter, RewriteOptions}
import org.apache.parquet.hadoop.util.HadoopInputFile
import org.apache.parquet.io.api.Binary
import org.apache.parquet.schema.MessageType
import org.apache.parquet.schema.PrimitiveType.PrimitiveTypeName

/** parquet-java as a peer: a request is a line of JSON on standard input, its answer one on standard output, so that one
  * JVM, which gets warm, serves many. Keys are in a request's Hadoop configuration, for the factory that it names.
  */
object Peer {
  private val mapper = new ObjectMapper

  def main(args: Array[String]): Unit = {
    val answers = new PrintStream(System.out, true, "UTF-8")
    System.setOut(System.err) // nothing that is logged may come between the answers
    val requests = new BufferedReader(new InputStreamReader(System.in, "UTF-8"))
    Iterator.continually(requests.readLine()).takeWhile(_ != null).foreach(line => answers.println(answer(line)))
  }

  private def answer(line: String): ObjectNode = {
    val answer = mapper.createObjectNode()
    try {
      val request = mapper.readTree(line)
      val source = new Source(request.required("source"))
      request.required("op").textValue match {
        case "copy"    => copy(source, request, answer)
        case "count"   => count(source, request.required("filter"), answer)
        case "splits"  => splits(source, request.required("ranges"), answer)
        case "rewrite" => rewrite(source, request, answer)
      }
      answer
    } catch {
      case error: VirtualMachineError => throw error
      case error: Throwable =>
        val causes = Iterator.iterate(error)(_.getCause).takeWhile(_ != null).take(10).map(_.toString)
        mapper.createObjectNode().set[ObjectNode]("error", mapper.valueToTree[JsonNode](causes.toSeq.asJava))
    }
  }

  /** Every row of the source, or those that a filter leaves, written to another file. */
  private def copy(source: Source, request: JsonNode, answer: ObjectNode): Unit = {
    val meta = source.open(_.getFileMetaData)
    val filter = Option(request.get("filter")).map(new Filter(_, meta.getSchema))
    val rows = Using.resource(new Target(request.required("target")).writer(meta)) { writer =>
      source.rows(filter)(_.map(row => writer.write(row)).size)
    }
    answer.put("rows", rows)
  }

  /** What is left of a file by the row groups' statistics, dictionaries and bloom filters, by the column index, and in the
    * end row by row.
    */
  private def count(source: Source, asked: JsonNode, answer: ObjectNode): Unit = {
    val filter = new Filter(asked, source.open(_.getFileMetaData.getSchema))
    source.open(
      reader =>
        answer
          .put("row_groups", reader.getRowGroups.size)
          .put("row_group_rows", reader.getRecordCount)
          .put("page_rows", reader.getFilteredRecordCount),
      filter.apply
    )
    answer.put("rows", source.rows(Some(filter))(_.size))
  }

  /** What a task gets that reads a range of the file, as Spark gives them: [start, end) in bytes. */
  private def splits(source: Source, ranges: JsonNode, answer: ObjectNode): Unit = {
    val tasks = answer.putArray("tasks")
    for (range <- ranges.asScala) {
      val (start, end) = (range.get(0).longValue, range.get(1).longValue)
      val task = tasks.addObject()
      val (ordinals, offsets) = (task.putArray("row_groups"), task.putArray("offsets"))
      source.open(
        _.getRowGroups.forEach { group =>
          ordinals.add(group.getOrdinal)
          offsets.add(group.getStartingPos)
        },
        _.withRange(start, end)
      )
      task.put("rows", source.rows(range = Some((start, end)))(_.size))
    }
  }

  /** ParquetRewriter encrypts pages without decoding them; several times if asked, and says how long each time took. */
  private def rewrite(source: Source, request: JsonNode, answer: ObjectNode): Unit = {
    val target = new Target(request.required("target"))
    val meta = source.open(_.getFileMetaData)
    val seconds = answer.putArray("seconds")
    for (_ <- 1 to request.path("times").asInt(1)) {
      target.path.getFileSystem(target.conf).delete(target.path, false)
      val began = System.nanoTime
      val keys = target.encryption(meta)
      val encrypted = meta.getSchema.getPaths.asScala
        .filter(path => keys.getColumnProperties(ColumnPath.get(path: _*)).isEncrypted)
        .map(_.mkString("."))
      val options = new RewriteOptions.Builder(source.conf, source.path, target.path)
      options.encrypt(encrypted.asJava).encryptionProperties(keys)
      Using.resource(new ParquetRewriter(options.build()))(_.processBlocks())
      seconds.add((System.nanoTime - began) / 1e9)
    }
  }
}

/** A file and the Hadoop configuration it is used with: {"path": .., "conf": {..}}. */
private abstract class File(asked: JsonNode) {
  val path = new Path(asked.required("path").textValue)
  val conf: Configuration = {
    val conf = new Configuration(true)
    conf.set("fs.file.impl", "org.apache.hadoop.fs.RawLocalFileSystem") // without .crc files beside the others
    conf.setBoolean("fs.file.impl.disable.cache", true)
    asked.path("conf").properties.forEach(one => conf.set(one.getKey, one.getValue.asText))
    conf
  }
}

private class Source(asked: JsonNode) extends File(asked) {
  type Options = HadoopReadOptions.Builder

  private def decryption: Option[FileDecryptionProperties] =
    Option(DecryptionPropertiesFactory.loadFactory(conf)).map(_.getFileDecryptionProperties(conf, path))

  /** The file with page checksums verified, for as long as the function runs. */
  def open[T](use: ParquetFileReader => T, more: Options => Any = _ => ()): T = {
    val options = HadoopReadOptions.builder(conf, path)
    options.usePageChecksumVerification(true)
    decryption.foreach(options.withDecryption)
    more(options)
    Using.resource(ParquetFileReader.open(HadoopInputFile.fromPath(path, conf), options.build()))(use)
  }

  /** Rows, one by one. */
  def rows[T](filter: Option[Filter] = None, range: Option[(Long, Long)] = None)(use: Iterator[Group] => T): T = {
    val reader = ParquetReader.builder(new GroupReadSupport, path).withConf(conf).usePageChecksumVerification()
    decryption.foreach(reader.withDecryption)
    filter.foreach(_.apply(reader))
    range.foreach { case (start, end) => reader.withFileRange(start, end) }
    Using.resource(reader.build())(open => use(Iterator.continually(open.read()).takeWhile(_ != null)))
  }
}

private class Target(asked: JsonNode) extends File(asked) {

  def encryption(meta: FileMetaData): FileEncryptionProperties = {
    val context = new WriteContext(meta.getSchema, meta.getKeyValueMetaData)
    Option(EncryptionPropertiesFactory.loadFactory(conf)).map(_.getFileEncryptionProperties(conf, path, context)).orNull
  }

  /** Options, all of them optional: writer (v1, v2), codec, page_size (bytes), page_rows, row_group_rows, dictionary,
    * bloom_filters (names of columns).
    */
  def writer(meta: FileMetaData): ParquetWriter[Group] = {
    val builder = ExampleParquetWriter
      .builder(path)
      .withConf(conf)
      .withType(meta.getSchema)
      .withExtraMetaData(meta.getKeyValueMetaData.asScala.toMap.removed("writer.model.name").asJava)
      .withWriteMode(Mode.OVERWRITE)
      .withEncryption(encryption(meta))
      .withWriterVersion(WriterVersion.fromString(asked.path("writer").asText("v1")))
      .withCompressionCodec(CompressionCodecName.fromConf(asked.path("codec").asText("uncompressed")))
      .withDictionaryEncoding(asked.path("dictionary").asBoolean(true))
    Option(asked.get("page_size")).foreach(size => builder.withPageSize(size.intValue))
    Option(asked.get("page_rows")).foreach(rows => builder.withPageRowCountLimit(rows.intValue))
    Option(asked.get("row_group_rows")).foreach(rows => builder.withRowGroupRowCountLimit(rows.intValue))
    asked.path("bloom_filters").forEach(column => builder.withBloomFilterEnabled(column.textValue, true))
    builder.build()
  }
}

/** {"column": "a.b", "is": "eq|notEq|lt|ltEq|gt|gtEq", "value": .., "use": ["stats", "dictionary", "bloom", "column index",
  * "rows"]}: `use` is what may be looked at to keep rows out, all of it if it is not there.
  */
private class Filter(asked: JsonNode, schema: MessageType) {
  private val column = asked.required("column").textValue
  private val value = asked.required("value")

  private val predicate: FilterPredicate =
    schema.getColumns.asScala.find(_.getPath.mkString(".") == column).get.getPrimitiveType.getPrimitiveTypeName match {
      case PrimitiveTypeName.INT32  => compare(FilterApi.intColumn(column), Int.box(value.intValue))
      case PrimitiveTypeName.INT64  => compare(FilterApi.longColumn(column), Long.box(value.longValue))
      case PrimitiveTypeName.FLOAT  => compare(FilterApi.floatColumn(column), Float.box(value.floatValue))
      case PrimitiveTypeName.DOUBLE => compare(FilterApi.doubleColumn(column), Double.box(value.doubleValue))
      case _                        => compare(FilterApi.binaryColumn(column), Binary.fromString(value.textValue))
    }

  private def compare[T <: Comparable[T], C <: Column[T] with SupportsLtGt](column: C, value: T): FilterPredicate =
    asked.required("is").textValue match {
      case "eq"    => FilterApi.eq[T, C](column, value)
      case "notEq" => FilterApi.notEq[T, C](column, value)
      case "lt"    => FilterApi.lt[T, C](column, value)
      case "ltEq"  => FilterApi.ltEq[T, C](column, value)
      case "gt"    => FilterApi.gt[T, C](column, value)
      case "gtEq"  => FilterApi.gtEq[T, C](column, value)
    }

  private def used(what: String): Boolean = !asked.has("use") || asked.get("use").asScala.exists(_.textValue == what)

  def apply(options: HadoopReadOptions.Builder): Unit =
    options
      .withRecordFilter(FilterCompat.get(predicate))
      .useStatsFilter(used("stats"))
      .useDictionaryFilter(used("dictionary"))
      .useBloomFilter(used("bloom"))
      .useColumnIndexFilter(used("column index"))
      .useRecordFilter(used("rows"))

  def apply(reader: ParquetReader.Builder[Group]): Unit =
    reader
      .withFilter(FilterCompat.get(predicate))
      .useStatsFilter(used("stats"))
      .useDictionaryFilter(used("dictionary"))
      .useBloomFilter(used("bloom"))
      .useColumnIndexFilter(used("column index"))
      .useRecordFilter(used("rows"))
}
